"""Tokens per second of Model Runner V2's budget on a simulated device, whose costs of the start may be wrong.

    python -m benchmarks.gpu.simulated --out benchmarks/results/gpu/simulated.json

The engine's own budget plans 600 steps of `opt_tree` for equal greedy requests: 24 nodes, at most 10 levels;
the last 300 count. A device runs them in times that are given: an 8 B target on an H100 (5.8 ms, rows are free up to
150) with a draft of 1.5 ms a level, or a head of one forward of 3 ms whose levels take 20 us. Ranks learn from rank 0's
times, 32 steps at once. As before: "kept", ranks stay with the costs of the start; "shared", each level is charged an
equal share of all drafting.
"""

import argparse
import heapq
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.budget import Costs, Curve, Planner
from vllm_adaptive_tree.budget.cost import profiled_rows
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.engine.v2 import budget as device_budget
from vllm_adaptive_tree.engine.v2 import phase_times
from vllm_adaptive_tree.engine.v2.budget import DeviceBudget, StepCost, StepTimes
from vllm_adaptive_tree.engine.v2.phase_times import PhaseTimes
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.trees import TreeBatch

NODES, DEPTH = 24, 10
RANKS = (0.68, 0.12, 0.06, 0.03)
"""Chance of a node's first, second, .. child to be the target's next token."""
STEPS, WARM = 600, 300


class Node(NamedTuple):
    parent: int
    depth: int
    value: float
    rank: int


def grown(levels: int) -> list[Node]:
    """Best nodes of a tree with so many levels."""
    count = itertools.count()
    heap = [(-chance, next(count), -1, 1, rank) for rank, chance in enumerate(RANKS)]
    found: list[Node] = []
    while heap and len(found) < NODES:
        value, _, parent, depth, rank = heapq.heappop(heap)
        if depth < levels:
            for below, chance in enumerate(RANKS):
                heapq.heappush(heap, (value * chance, next(count), len(found), depth + 1, below))
        found.append(Node(parent, depth, -value, rank))
    return found


TREES = {levels: grown(levels) for levels in range(1, 1 + DEPTH)}


def batch_of(tree: list[Node], requests: int) -> TreeBatch:
    columns = [range(len(tree)), [node.parent for node in tree], [node.depth for node in tree]]
    tokens, parent, depth = (torch.tensor(list(column)).expand(requests, -1) for column in columns)
    return TreeBatch(tokens, parent, depth, torch.tensor([node.value for node in tree]).log().expand(requests, -1))


class Device:
    """One whose verification of `rows` and level of `requests` take what these functions say, in seconds; `block`:
    seconds of a forward over the roots, None: a level's."""

    def __init__(
        self,
        verify: Callable[[int], float],
        level: Callable[[int], float],
        *,
        block: float | None = None,
    ):
        self.verify, self.level, self.block, self.now = verify, level, block, 1.0
        self.levels = list[int]()
        """Levels that each step drafts."""

    def rate(self, requests: int, told: Costs, *, alone: bool = True) -> float:
        """Tokens per second, once warm, of a budget that was `told` these costs, relative to no drafts."""
        options, _ = TreeOptions.parse({"method": "opt_tree", "model": "x", "num_speculative_tokens": NODES})
        pair, times, rng = resolve(options), PhaseTimes(torch.device("cpu")), random.Random(0)
        planner = Planner(told, sampled=False)
        budget = DeviceBudget(planner, ThresholdController(pair.proposer, options.tree.steered), times, learns=True)
        budget.begin_learning(planner, None, alone=alone)
        budget.nodes = 0
        with patch.object(phase_times.time, "perf_counter", lambda: self.now):
            rate = self._decode(budget, times, requests, rng)
        return rate / (requests / self.verify(requests))

    def _decode(self, budget: DeviceBudget, times: PhaseTimes, requests: int, rng: random.Random) -> float:
        greedy, tree = np.ones(requests, dtype=bool), list[Node]()
        tokens, began = 0, 0.0
        for step in range(STEPS):
            if step == WARM:
                tokens, began = 0, self.now
            kept = tree[: (budget.nodes or 0) // requests]
            rows = requests * (1 + len(kept))
            with times.phase("verify"):
                self.now += self.verify(rows)
            paths = [walked(kept, rng) for _ in range(requests)]
            tokens += sum(1 + len(path) for path in paths)
            if kept:
                nodes = torch.tensor([path + [-1] * (DEPTH + 1 - len(path)) for path in paths])
                budget.verified(batch_of(kept, requests), Accepted(nodes, nodes), greedy, None)
            with times.phase("draft"):
                levels = min(DEPTH, budget.begin_step(greedy))
                tree = TREES[levels] if levels else []
                self.levels.append(levels)
                if levels:
                    self.now += self.level(requests) if self.block is None else self.block
                    with times.phase("grow"):
                        self.now += (levels - 1) * self.level(requests)
                if tree:
                    budget.drafted(batch_of(tree, requests), greedy, None)
                forwards = max(levels - 1, 0)
                budget.end_step(requests, rows, 0, forwards, prefills=False, missed=False, trees=bool(tree))
            times.take()
        return tokens / (self.now - began)

    def told(self, verify: Callable[[int], float], level: Callable[[int], float]) -> Costs:
        rows, levels = profiled_rows(256), [1, NODES]
        return Costs(Curve(rows, [verify(count) for count in rows]), Curve(levels, [level(count) for count in levels]))


def walked(tree: list[Node], rng: random.Random) -> list[int]:
    """Accepted nodes."""
    children = {(node.parent, node.rank): place for place, node in enumerate(tree)}
    path: list[int] = []
    while True:
        rank = rng.choices(range(1 + len(RANKS)), [*RANKS, 1 - sum(RANKS)])[0]
        place = children.get((path[-1] if path else -1, rank))
        if place is None:
            return path
        path.append(place)


def dense(rows: int) -> float:
    """An 8 B target on an H100: rows are free up to 150."""
    return 0.0058 + max(0, rows - 150) * 2.4e-5


def draft(requests: int) -> float:
    return 0.0015


WRONG = (2, 1), (0.5, 1), (1, 3.7), (1, 0.5), (2, 3.7), (0.5, 0.5)
"""Factors of the costs of the start, of a verification and of a level."""


def wrongly_told(device: Device, verify: float, level: float) -> Costs:
    return device.told(lambda rows: verify * device.verify(rows), lambda count: level * device.level(count))


def head() -> Device:
    """One with a head of one forward."""
    return Device(dense, lambda count: 2e-5, block=0.003)


def share(self: DeviceBudget, step: StepCost, times: StepTimes) -> None:
    """`DeviceBudget._follow` as it was."""
    drafting = times.draft if step.levels else 0.0
    self.budget.observe_step(step.rows, step.context, times.step - drafting, 0.0, drafted=step.levels > 0)
    if step.levels:
        self.budget.observe_level(step.requests, step.requests, drafting / step.levels)


def rates(device: Device, requests: int, told: tuple[float, float]) -> dict[str, float]:
    """Relative to no drafts: with right costs of the start, and wrong ones that one rank, or more, learn or keep."""
    found = {"right": device.rate(requests, wrongly_told(device, 1, 1))}
    found["learnt"] = device.rate(requests, wrongly_told(device, *told))
    with patch.object(DeviceBudget, "_follow", share):
        found["shared"] = device.rate(requests, wrongly_told(device, *told))
    for name, every in (("ranks", device_budget.EVERY), ("kept", STEPS)):
        with (
            patch.object(device_budget, "is_rank_0", lambda: True),
            patch.object(device_budget, "object_from_rank_0", lambda mine: mine),
            patch.object(device_budget, "EVERY", every),
        ):
            found[name] = device.rate(requests, wrongly_told(device, *told), alone=False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    for name, device in (("draft", Device(dense, draft)), ("head of one forward", head())):
        for requests, told in itertools.product((1, 8, 16), WRONG):
            rows.append({"device": name, "requests": requests, "told": told, **rates(device, requests, told)})
            print(rows[-1], flush=True)
    if options.out is not None:
        save(options.out, rows)


if __name__ == "__main__":
    main()
