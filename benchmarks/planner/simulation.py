"""Steps of recorded trees under simulated loads and costs, in tokens per simulated second."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.policies import Fixed, Policy, StepPlan
from benchmarks.planner.recording import Recording
from vllm_adaptive_tree.budget import Costs, Curve
from vllm_adaptive_tree.budget.cost import profiled_rows

REQUEST, PROMPT = 100, 32
"""Tokens after which another request takes the place of one, and tokens that the draft reads of it first."""
SIGMA, STALLS, STALL = 0.08, 0.01, 5.0
"""The times that a policy is told are lognormal, and some are so many times as long. Tokens per second are by the times
without noise, so that a few seeds are enough."""
PROFILED = 256
"""Rows up to which a policy's profile knows the verification."""
GROUPS = 512
"""Batches that constant trees are judged by."""


@dataclass(frozen=True)
class Machine:
    name: str
    verify: Curve  # seconds of a verification by rows
    draft: Curve  # seconds of a draft level by rows
    step: float  # seconds of a step outside both models
    off: tuple[float, float] = (
        1.0,
        1.0,
    )  # factors of the verification and level costs that a policy is given at first

    def profile(self) -> Costs:
        """Costs that a policy is given at the start, at the points that an engine measures."""
        rows, levels = np.array(profiled_rows(PROFILED)), np.array([1, 2, 4, 24])
        verify, draft = self.verify.at(rows) * self.off[0], self.draft.at(levels) * self.off[1]
        return Costs(Curve(rows, verify), Curve(levels, draft))

    def plain(self, requests: int) -> float:
        """Seconds of a step without drafts."""
        return self.verify.cost(requests) + self.step


class Workload(NamedTuple):
    name: str
    batches: tuple[int, ...]  # requests at a time, in phases of equal time
    greedy: float = 1.0  # share of requests


class Row(NamedTuple):
    recording: Recording
    workload: Workload
    machine: Machine


class Run(NamedTuple):
    tokens: int
    seconds: float
    steps: int
    own: float  # host seconds that the policy took itself

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def _no_tree() -> list[NDArray[np.float64]]:
    return [np.zeros(0)] * 3


@dataclass
class Request:
    name: str
    greedy: bool
    trees: range
    step: int
    tokens: int = 0
    unread: int = PROMPT  # tokens that the draft has not read
    usual: bool = False  # the draft has read it in the last step
    tree: list[NDArray[np.float64]] = field(default_factory=_no_tree)  # kept nodes: value, depth, accepted


class Batch:
    """The running requests. A new one continues somewhere in a stream, and has no tree in its first step."""

    def __init__(self, row: Row, rng: np.random.Generator):
        self.requests: list[Request] = []
        self.share, self.rng, self.started = row.workload.greedy, rng, 0
        self.streams = [self._shuffled(streams) for streams in row.recording.streams]

    def _shuffled(self, streams: Sequence[range]) -> Iterator[range]:
        while True:
            yield from (streams[one] for one in self.rng.permutation(len(streams)))

    def fill(self, size: int) -> list[str]:
        """Let requests leave and come; the names of those that have left."""
        before, self.requests = self.requests, [one for one in self.requests[:size] if one.tokens < REQUEST]
        while len(self.requests) < size:
            greedy = sum(one.greedy for one in self.requests) < self.share * (1 + len(self.requests))
            stream = next(self.streams[greedy])
            self.requests.append(Request(f"{self.started}", greedy, stream, int(self.rng.integers(len(stream)))))
            self.started += 1
        return [one.name for one in before if one not in self.requests]


def simulate(row: Row, policy: Policy, *, seed: int, steps: int) -> Run:
    """Run `policy` for as long as `steps` steps without drafts take. Each step verifies the trees of the last one."""
    recording, workload, machine = row
    rng = np.random.default_rng(seed)
    batch, tokens, count, seconds, own = Batch(row, rng), 0, 0, 0.0, 0.0
    phase = steps * float(np.mean([machine.plain(size) for size in workload.batches])) / len(workload.batches)

    def noisy(seconds: float) -> float:
        return seconds * math.exp(rng.normal(0, SIGMA)) * (STALL if rng.random() < STALLS else 1.0)

    for number, size in enumerate(workload.batches, 1):
        while seconds < number * phase:
            left, requests = batch.fill(size), batch.requests
            rows = size + sum(len(one.tree[0]) for one in requests)
            verify, spent = machine.verify.cost(rows), [0.0]
            own -= time.perf_counter()
            policy.forget(left)
            for kind in (False, True):
                if trees := [one.tree for one in requests if one.greedy == kind and len(one.tree[0])]:
                    value, depth, accepted = map(np.concatenate, zip(*trees, strict=True))
                    policy.verified(value, depth, accepted, greedy=kind)
            plan = policy.begin([one.name for one in requests], [one.greedy for one in requests])
            own += time.perf_counter()
            for one in requests:
                new = 1 + int(one.tree[2].sum())
                one.tokens, one.unread, one.step, one.tree = (
                    one.tokens + new,
                    one.unread + new,
                    one.step + 1,
                    _no_tree(),
                )
                tokens += new
            drafting = [one for one, drafts in zip(requests, plan.draft, strict=True) if drafts]
            if drafting:
                grown = recording.grow(np.array([one.trees[one.step % len(one.trees)] for one in drafting]), plan)
                spent = [machine.draft.cost(sum(one.unread for one in drafting))]
                spent += [machine.draft.cost(len(drafting))] * int(grown.levels.max())
                told, usual = [noisy(one) for one in spent], all(one.usual for one in drafting)
                names, greedy = [one.name for one in drafting], np.array([one.greedy for one in drafting])
                own -= time.perf_counter()
                kept = policy.share(
                    names, grown.value, grown.depth, greedy, told, others=size - len(drafting), usual=usual
                )
                own += time.perf_counter()
                for one, most, *columns in zip(drafting, kept, *grown[:3], strict=True):
                    most = min(int(most), int((columns[1] > 0).sum()))
                    one.tree, one.unread = [column[:most] for column in columns], 0
            for one, drafts in zip(requests, plan.draft, strict=True):
                one.usual = drafts
            told_verify, told_step = noisy(verify), noisy(machine.step)
            own -= time.perf_counter()
            policy.took(rows, told_verify, told_step, size)
            own += time.perf_counter()
            seconds, count = seconds + verify + machine.step + sum(spent), count + 1
    return Run(tokens, seconds, count, own)


def expected(row: Row, fixed: Fixed) -> float:
    """Tokens per second of constant trees, as a long simulation would find them."""
    recording, workload, machine = row
    if not fixed.nodes:
        return float(np.mean([size / machine.plain(size) for size in workload.batches]))
    (columns, shares), rng, rates = _always(recording, fixed.plan()), np.random.default_rng(0), []
    for size in workload.batches:
        greedy = math.ceil(workload.greedy * size)
        index = [
            rng.choice(len(share), (GROUPS, count), p=share)
            for share, count in zip(shares, (size - greedy, greedy), strict=True)
        ]
        gained, nodes, levels = columns[:, np.concatenate(index, 1)]
        tokens = size + gained.sum(1)
        drafting = machine.draft.at(tokens) + levels.max(1) * machine.draft.cost(size)
        seconds = machine.verify.at(size + nodes.sum(1)) + machine.step + drafting
        rates.append(tokens.sum() / seconds.sum())
    return float(np.mean(rates))


@cache
def _always(recording: Recording, plan: StepPlan) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
    """Accepted and verified nodes and draft levels of constant trees [3, T + 1], the last for a request's first step,
    which has none; and the share of each in the steps of sampled and of greedy requests, [T + 1]."""
    grown = recording.grow(np.arange(len(recording.value)), plan)
    gained, shares = grown.accepted.sum(1), []
    for streams in recording.streams:
        share = np.zeros(1 + len(gained))
        for stream in streams:
            endless = np.tile(1 + gained[stream], 2 + REQUEST // len(stream))
            for start in range(len(stream)):
                count = 1 + int(np.searchsorted(endless[start:].cumsum(), REQUEST - 1))
                np.add.at(share, stream[0] + (start + np.arange(count)) % len(stream), 1)
            share[-1] += len(stream)
        shares.append(share / share.sum())
    columns = np.stack([gained, (grown.depth > 0).sum(1), grown.levels])
    return np.pad(columns, ((0, 0), (0, 1))), shares
