"""Arrival times of tokens, and the engine's counters, for an engine in a process and for a server."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Self

from vllm_adaptive_tree.bench.rounds import Measurement
from vllm_adaptive_tree.bench.workloads import checksum

COUNTERS = {  # names as a server's /metrics writes them
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "nodes",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:iteration_tokens_total_count": "steps",  # a histogram with one observation per step of the engine
}
PHASE_SECONDS = "vllm:adaptive_tree_phase_seconds_sum"
DEPTHS = "vllm:adaptive_tree_nodes_total"


@dataclass(slots=True)
class RequestTiming:
    """One request: its tokens by step, for steps with any, and the times of the first and the last of these steps."""

    steps: list[list[int]] = field(default_factory=list)  # the first one is the prefill's
    first: float = 0.0  # seconds
    last: float = 0.0

    def add(self, tokens: Iterable[int], now: float) -> None:
        if not self.steps:
            self.first = now
        self.steps.append(list(tokens))
        self.last = now

    @property
    def tokens(self) -> list[int]:
        return list(chain.from_iterable(self.steps))

    @property
    def num_decoded(self) -> int:
        """Tokens after the prefill's."""
        return sum(map(len, self.steps[1:]))

    @property
    def time_per_token(self) -> float | None:
        return (self.last - self.first) / self.num_decoded if self.num_decoded else None


class Counters(NamedTuple):
    """Counts of an engine since it started."""

    counts: dict[str, float]  # by the names in COUNTERS
    phases: dict[str, float]  # seconds
    depths: dict[str, float]  # nodes by depth

    @classmethod
    def read(cls, samples: Iterable[tuple[str, Mapping[str, str], float]]) -> Self:
        """Counters from samples (name, labels, value)."""
        found = cls(dict.fromkeys(COUNTERS.values(), 0.0), {}, {})
        for name, labels, value in samples:
            if name in COUNTERS:
                found.counts[COUNTERS[name]] += value
            elif name == PHASE_SECONDS:
                found.phases[labels["phase"]] = value
            elif name == DEPTHS:
                found.depths[labels["depth"]] = value
        return found

    def since(self, before: Self) -> "Counters":
        pairs = zip(self, before, strict=True)
        return Counters(*({key: value - then.get(key, 0.0) for key, value in now.items()} for now, then in pairs))


def measurement(
    requests: Iterable[RequestTiming],
    seconds: float,
    counted: Counters,
    memory: int,
    other_cores: float,
    *,
    keep_tokens: bool = False,
) -> Measurement:
    requests = [one for one in requests if one.steps]
    counts = {name: int(count) for name, count in counted.counts.items()}
    return Measurement(
        seconds=seconds,
        tokens=sum(len(one.tokens) for one in requests),
        time_per_token=[one.time_per_token for one in requests if one.time_per_token is not None],
        decode_tokens=sum(one.num_decoded for one in requests),
        decode_steps=sum(len(one.steps) - 1 for one in requests),
        steps=counts["steps"],
        drafts=counts["drafts"],
        nodes=counts["nodes"],
        accepted=counts["accepted"],
        memory=memory,
        other_cores=other_cores,
        phases=counted.phases,
        depths={depth: int(count) for depth, count in counted.depths.items()},
        outputs=[checksum(one.tokens) for one in requests],
        token_steps=[one.steps for one in requests] if keep_tokens else [],
    )


def peak_memory(processes: Iterable[int]) -> int:
    """Bytes: the sum of the processes' peak resident sizes."""
    total = 0
    for process in processes:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total
