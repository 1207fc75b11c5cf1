"""Finished rounds on disk, so that a run that was ended goes on where it stood."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from vllm_adaptive_tree.files import atomic_write

SETTINGS, ROUNDS = "settings.json", "rounds.jsonl"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one engine did in one round of one cell."""

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
    repaired: bool = False  # see repair.py
    phases: dict[str, float] = field(default_factory=dict)  # seconds; of a tree method
    depths: dict[str, int] = field(default_factory=dict)  # depth -> nodes; of a tree method
    outputs: list[str] = field(default_factory=list)  # checksums of the tokens, one per request
    swing: dict[str, list[float]] = field(default_factory=dict)  # concurrency -> [tokens, seconds]


class Round(NamedTuple):
    """One cell, once, by every engine of a stage, one after the other."""

    stage: str
    cell: str
    number: int
    measured: Mapping[str, Measurement]  # by the configuration's name


class Store:
    """A folder with the settings of a run and the rounds that it has finished."""

    def __init__(self, folder: Path, rounds: Sequence[Round]):
        self.folder, self.rounds = folder, list(rounds)

    @classmethod
    def open(cls, folder: Path, settings: Mapping[str, Any]) -> Self:
        """The folder of a new run, or of an earlier one with the same `settings` (JSON).

        Raises:
            ValueError: the folder belongs to a run with other settings, or holds something else.
            OSError: it cannot be read or written.
        """
        file = folder / SETTINGS
        wanted = json.loads(json.dumps({"format": FORMAT, **settings}))
        if file.exists():
            found = json.loads(file.read_text())
            differing = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
            if differing:
                changes = "; ".join(f"{key}: {found.get(key)!r} there, {wanted.get(key)!r} now" for key in differing)
                raise ValueError(
                    f"{folder} holds rounds of another run ({changes}); give the same arguments to go on there, "
                    "another --out, or delete that folder"
                )
        elif folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no {SETTINGS}; give another --out or delete that folder")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(file, (json.dumps(wanted, indent=2) + "\n").encode())
        lines = folder / ROUNDS
        return cls(folder, [_round(line) for line in lines.read_text().splitlines()] if lines.exists() else [])

    def add(self, finished: Round) -> None:
        self.rounds.append(finished)
        atomic_write(self.folder / ROUNDS, "".join(map(_line, self.rounds)).encode())

    def numbers(self, stage: str, cell: str) -> set[int]:
        """The rounds of that cell that are finished."""
        return {one.number for one in self.rounds if (one.stage, one.cell) == (stage, cell)}


def _line(one: Round) -> str:
    measured = {name: asdict(measurement) for name, measurement in one.measured.items()}
    return json.dumps({**one._asdict(), "measured": measured}) + "\n"


def _round(line: str) -> Round:
    data = json.loads(line)
    return Round(**{**data, "measured": {name: Measurement(**one) for name, one in data["measured"].items()}})
