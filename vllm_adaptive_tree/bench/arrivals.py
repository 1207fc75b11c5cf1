"""Tokens as they arrive, and the engine's counters: the same for an engine in a process and behind a server."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from vllm_adaptive_tree.bench.loads import checksum
from vllm_adaptive_tree.bench.rounds import Measurement

COUNTED = {  # names as a server's /metrics writes them
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "nodes",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:iteration_tokens_total_count": "steps",  # a histogram with one observation per step of the engine
}
PHASE_SECONDS = "vllm:adaptive_tree_phase_seconds_sum"
DEPTHS = "vllm:adaptive_tree_nodes_total"


@dataclass(slots=True)
class Arrivals:
    """Of one request: its tokens, and when the first and the last of them came."""

    tokens: list[int] = field(default_factory=list)
    steps: int = 0  # that brought tokens
    head: int = 0  # tokens of the first of them, which is the prefill's
    first: float = 0.0  # seconds
    last: float = 0.0

    def add(self, tokens: Iterable[int], now: float) -> None:
        self.tokens += tokens
        if not self.steps:
            self.first, self.head = now, len(self.tokens)
        self.steps, self.last = self.steps + 1, now

    @property
    def time_per_token(self) -> float | None:
        later = len(self.tokens) - self.head
        return (self.last - self.first) / later if later else None


class Counters(NamedTuple):
    """Of an engine, since it started."""

    counts: dict[str, float]  # by the names in COUNTED
    phases: dict[str, float]  # seconds
    depths: dict[str, float]  # nodes by depth

    @classmethod
    def read(cls, samples: Iterable[tuple[str, Mapping[str, str], float]]) -> Self:
        """Of (name, labels, value)."""
        found = cls(dict.fromkeys(COUNTED.values(), 0.0), {}, {})
        for name, labels, value in samples:
            if name in COUNTED:
                found.counts[COUNTED[name]] += value
            elif name == PHASE_SECONDS:
                found.phases[labels["phase"]] = value
            elif name == DEPTHS:
                found.depths[labels["depth"]] = value
        return found

    def since(self, before: Self) -> "Counters":
        pairs = zip(self, before, strict=True)
        return Counters(*({key: value - then.get(key, 0.0) for key, value in now.items()} for now, then in pairs))


def measurement(
    requests: Iterable[Arrivals],
    seconds: float,
    counted: Counters,
    memory: int,
    other_cores: float,
    swing: Mapping[str, list[float]] | None = None,
) -> Measurement:
    requests = [one for one in requests if one.tokens]
    counts = {name: int(count) for name, count in counted.counts.items()}
    return Measurement(
        seconds=seconds,
        tokens=sum(len(one.tokens) for one in requests),
        time_per_token=[one.time_per_token for one in requests if one.time_per_token is not None],
        decode_tokens=sum(len(one.tokens) - one.head for one in requests),
        decode_steps=sum(one.steps - 1 for one in requests),
        steps=counts["steps"],
        drafts=counts["drafts"],
        nodes=counts["nodes"],
        accepted=counts["accepted"],
        memory=memory,
        other_cores=other_cores,
        phases=counted.phases,
        depths={depth: int(count) for depth, count in counted.depths.items()},
        outputs=[] if swing else [checksum(one.tokens) for one in requests],
        swing=dict(swing or {}),
    )


def peak_memory(processes: Iterable[int]) -> int:
    """Bytes: the largest resident size that each of the processes has had, added up."""
    total = 0
    for process in processes:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total
