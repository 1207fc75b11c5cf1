"""Model Runner V2's budget on a simulated device: costs of the start that are wrong are soon right."""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.budget import Budget, Costs, Curve, Plan, Planner
from vllm_adaptive_tree.budget.cost import profiled_rows
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.engine.v2 import budget as device_budget
from vllm_adaptive_tree.engine.v2 import phase_times
from vllm_adaptive_tree.engine.v2.budget import DeviceBudget
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.trees import TreeBatch

NODES, DEPTH = 24, 10
RANKS = (0.68, 0.12, 0.06, 0.03)
"""Chance of a node's first, second, .. child to be the target's next token."""
STEPS, WARM = 400, 150


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
        monkeypatch: pytest.MonkeyPatch,
        *,
        block: float | None = None,
    ):
        self.verify, self.level, self.block, self.now = verify, level, block, 1.0
        self.levels = list[int]()
        monkeypatch.setattr(phase_times.time, "perf_counter", lambda: self.now)

    def rate(self, requests: int, told: Costs, *, alone: bool = True) -> float:
        """Tokens per second, once warm, of a budget that was `told` these costs, relative to no drafts."""
        options, _ = TreeOptions.parse({"method": "opt_tree", "model": "x", "num_speculative_tokens": NODES})
        pair, times, rng = resolve(options), phase_times.PhaseTimes(torch.device("cpu")), random.Random(0)
        planner = Planner(told, sampled=False)
        budget = DeviceBudget(planner, ThresholdController(pair.proposer, options.tree.steered), times, learns=True)
        budget.begin_learning(planner, None, alone=alone)
        greedy, tree = np.ones(requests, dtype=bool), list[Node]()
        tokens, began, budget.nodes = 0, 0.0, 0
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
        return tokens / (self.now - began) / (requests / self.verify(requests))

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


WRONG = (2, 1), (0.5, 1), (1, 2), (1, 0.5), (2, 3.7), (0.5, 0.5)
"""Factors of the costs of the start, of a verification and of a level."""


def wrongly_told(device: Device, verify: float, level: float) -> Costs:
    return device.told(lambda rows: verify * device.verify(rows), lambda count: level * device.level(count))


@pytest.mark.parametrize("requests", [1, 8, 16])
def test_wrong_costs_of_the_start_are_found(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(dense, draft, monkeypatch)
    right = device.rate(requests, device.told(dense, draft))
    assert right > 1.3
    for verify, level in WRONG:
        told = wrongly_told(device, verify, level)
        assert device.rate(requests, told) > 0.95 * right, (verify, level)
    assert told.draft.cost(requests) == pytest.approx(draft(requests), rel=0.1)
    assert told.verify.cost(requests * (1 + NODES)) == pytest.approx(dense(requests * (1 + NODES)), rel=0.1)


def test_levels_of_a_block_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of one forward drafts as deep as it can, whatever the block takes: a level is what another level takes."""
    device = Device(dense, lambda count: 2e-5, monkeypatch, block=0.003)
    for verify, level in WRONG:
        device.levels.clear()
        assert device.rate(1, wrongly_told(device, verify, level)) > 1.5
        drafting = [levels for levels in device.levels[WARM:] if levels]
        assert np.median(drafting) > 5, (verify, level)


def test_ranks_learn_from_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """All must come to the same numbers, and times differ: rank 1's device seems ten times as slow."""
    sent = list[Any]()
    monkeypatch.setattr(device_budget, "is_rank_0", lambda: True)
    monkeypatch.setattr(device_budget, "object_from_rank_0", lambda mine: sent.append(mine) or mine)
    device = Device(dense, draft, monkeypatch)
    told = wrongly_told(device, 2, 3.7)
    right = device.rate(8, device.told(dense, draft))
    assert device.rate(8, told, alone=False) > 0.95 * right
    assert told.draft.cost(8) == pytest.approx(draft(8), rel=0.1)
    planned = device.levels[-STEPS:]

    received = iter(sent)
    monkeypatch.setattr(device_budget, "is_rank_0", lambda: False)
    monkeypatch.setattr(device_budget, "object_from_rank_0", lambda mine: next(received))
    slow = Device(lambda rows: 10 * dense(rows), lambda count: 10 * draft(count), monkeypatch)
    slow.rate(8, wrongly_told(device, 2, 3.7), alone=False)
    assert slow.levels == planned


class Scripted(Budget):
    """Plans of 8 requests, one a step, and what it is shown."""

    def __init__(self, plans: list[Plan]):
        super().__init__(sampled=False)
        self.plans, self.shown = iter(plans), list[int]()

    def begin(self, greedy: Sequence[bool]) -> Plan:
        self.plan = next(self.plans)
        return self.plan

    def observe_trees(self, value: ArrayLike, *args: Any, **options: Any) -> None:
        self.shown.append(len(np.asarray(value)))


def test_a_trial_by_a_few() -> None:
    """The same requests draft throughout a trial, others in the next; only theirs are learnt from, and verified. Then
    the whole batch drafts trees like those."""
    rest, few, whole = Plan(0, 1.0), Plan(2, 1.0, few=2), Plan(2, 1.0)
    plans = [rest, few, few, few, few, rest, few, few, few, whole, whole, whole, rest]
    budget, times = Scripted(plans), phase_times.PhaseTimes(torch.device("cpu"))
    options, _ = TreeOptions.parse({"method": "opt_tree", "model": "x", "num_speculative_tokens": NODES})
    steering = ThresholdController(resolve(options).proposer, options.tree.steered)
    device, greedy = DeviceBudget(budget, steering, times, learns=True), np.ones(8, dtype=bool)
    drafted, verified = list[tuple[int, ...]](), list[int]()
    for plan in plans:
        assert device.begin_step(greedy) == plan.levels
        drafting = device.drafting(greedy) if plan.levels else np.zeros(8, dtype=bool)
        drafted.append(() if drafting is None else tuple(np.flatnonzero(drafting)))
        if plan.levels:
            tree = batch_of(TREES[2], 8)
            if drafting is not None:
                tree = tree._replace(tokens=tree.tokens.masked_fill(~torch.from_numpy(drafting)[:, None], -1))
            device.drafted(tree, greedy, None, drafting)
        device.end_step(8, 8, 0, 1, prefills=False, missed=False, trees=plan.levels > 0)
        verified.append(device.nodes)
    assert drafted[1:5] == 4 * [drafted[1]]
    assert drafted[6:9] == 3 * [drafted[6]]
    assert len({*drafted[1], *drafted[6]}) == 4
    assert drafted[9:12] == 3 * [()], "all"
    assert budget.shown == 7 * [2] + 2 * [8]
    size = len(TREES[2])
    assert verified[3:5] == [2 * size] * 2
    assert verified[6:12] == 3 * [2 * size] + 3 * [8 * size]
    assert verified[5] == verified[12] == 0
