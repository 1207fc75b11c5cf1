"""Finished rounds on disk, so that an interrupted run can resume."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from vllm_adaptive_tree.files import atomic_write, claim_folder

SETTINGS, ROUNDS = "settings.json", "rounds.jsonl"
FORMAT = 2


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures of one engine for one round of one cell."""

    seconds: float
    tokens: int
    time_per_token: list[float]  # seconds per output token after the first, one per request
    decode_tokens: int  # those that came after a request's first step, its prefill
    decode_steps: int  # of requests, one after the other: two requests in one step of the engine count twice
    steps: int  # of the engine
    drafts: int  # requests times steps that had draft tokens
    nodes: int  # draft tokens verified
    accepted: int
    memory: int  # bytes, the peak of the engine's processes so far
    other_cores: float = 0.0  # that other programs kept busy meanwhile
    repaired: bool = False  # see vllm_55005.py
    phases: dict[str, float] = field(default_factory=dict)  # seconds; of a tree method
    depths: dict[str, int] = field(default_factory=dict)  # depth -> nodes; of a tree method
    outputs: list[str] = field(default_factory=list)  # checksums of the tokens, one per request
    bursty: dict[str, list[float]] = field(default_factory=dict)  # concurrency -> [tokens, seconds]
    token_steps: list[list[list[int]]] = field(default_factory=list)  # [request][step][token], if they are kept

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Round(NamedTuple):
    """One cell, measured once with every engine of a stage in turn."""

    stage: str
    cell: str
    number: int
    measured: dict[str, Measurement]  # by the configuration's name

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "measured": {name: asdict(one) for name, one in self.measured.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "measured": {name: Measurement(**one) for name, one in data["measured"].items()}})


class Store:
    """Folder with the settings of a run and its finished rounds."""

    def __init__(self, folder: Path, rounds: Sequence[Round]):
        self.folder, self.rounds = folder, list(rounds)

    @classmethod
    def open(cls, folder: Path, settings: Mapping[str, Any]) -> Self:
        """Open the folder of a new run, or of an earlier one with the same `settings` (JSON).

        Raises:
            ValueError: the folder belongs to a run with other settings, or holds something else.
            OSError: it cannot be read or written.
        """
        claim_folder(folder / SETTINGS, {"format": FORMAT, **settings}, contents="the rounds")
        lines = folder / ROUNDS
        return cls(
            folder,
            [Round.from_json(json.loads(line)) for line in lines.read_text().splitlines()] if lines.exists() else [],
        )

    def add(self, finished: Round) -> None:
        self.rounds.append(finished)
        atomic_write(self.folder / ROUNDS, "".join(json.dumps(one.to_json()) + "\n" for one in self.rounds).encode())

    def numbers(self, stage: str, cell: str) -> set[int]:
        """Numbers of the finished rounds of that cell."""
        return {one.number for one in self.rounds if (one.stage, one.cell) == (stage, cell)}
