"""Model Runner V2's budget on a simulated device: costs of the start that are wrong are soon right."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from benchmarks.gpu.simulated import (
    NODES,
    STEPS,
    TREES,
    WARM,
    WRONG,
    Device,
    batch_of,
    dense,
    draft,
    head,
    wrongly_told,
)
from benchmarks.gpu.simulated_chains import rates
from vllm_adaptive_tree.budget import Budget, Plan
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.engine.v2 import budget as device_budget
from vllm_adaptive_tree.engine.v2 import phase_times
from vllm_adaptive_tree.engine.v2.budget import DeviceBudget
from vllm_adaptive_tree.methods import resolve


def test_a_chain_follows_its_text() -> None:
    """In hard text one level pays where the usual number does not: the draft does not rest."""
    found = rates(draft, 100, 1)
    assert found["adaptive"] > 1.05 * max(found["fixed"].values())


@pytest.mark.parametrize("requests", [1, 8, 16])
def test_wrong_costs_of_the_start_are_found(requests: int) -> None:
    device = Device(dense, draft)
    right = device.rate(requests, device.told(dense, draft))
    assert right > 1.3
    for verify, level in WRONG:
        told = wrongly_told(device, verify, level)
        assert device.rate(requests, told) > 0.95 * right, (verify, level)
    assert told.draft.cost(requests) == pytest.approx(draft(requests), rel=0.1)
    assert told.verify.cost(requests * (1 + NODES)) == pytest.approx(dense(requests * (1 + NODES)), rel=0.1)


def test_levels_of_a_block_are_free() -> None:
    """A head of one forward drafts as deep as it can, whatever the block takes: a level is what another level takes."""
    device = head()
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
    device = Device(dense, draft)
    told = wrongly_told(device, 2, 3.7)
    right = device.rate(8, device.told(dense, draft))
    assert device.rate(8, told, alone=False) > 0.95 * right
    assert told.draft.cost(8) == pytest.approx(draft(8), rel=0.1)
    planned = device.levels[-STEPS:]

    received = iter(sent)
    monkeypatch.setattr(device_budget, "is_rank_0", lambda: False)
    monkeypatch.setattr(device_budget, "object_from_rank_0", lambda mine: next(received))
    slow = Device(lambda rows: 10 * dense(rows), lambda count: 10 * draft(count))
    slow.rate(8, wrongly_told(device, 2, 3.7), alone=False)
    assert slow.levels == planned


class Scripted(Budget):
    """Plans of 8 requests, one a step, and what it is shown."""

    def __init__(self, plans: list[Plan]):
        super().__init__(sampled=False)
        self.plans, self.shown, self.widths = iter(plans), list[int](), list[int]()

    def begin(self, greedy: Sequence[bool]) -> Plan:
        self.plan = next(self.plans)
        return self.plan

    def observe_trees(self, value: ArrayLike, *args: Any, **options: Any) -> None:
        self.shown.append(len(np.asarray(value)))
        self.widths.append(np.asarray(value).shape[1])


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


def test_nodes_beyond_the_quota_bring_nothing() -> None:
    """The scheduler of a crowd cuts them off; a plan that counted them would draft levels in vain."""
    budget, times = Scripted([Plan(2, 1.0)] * 5), phase_times.PhaseTimes(torch.device("cpu"))
    options, _ = TreeOptions.parse({"method": "opt_tree", "model": "x", "num_speculative_tokens": NODES})
    steering = ThresholdController(resolve(options).proposer, options.tree.steered)
    quotas = [0, *[NODES] * 7, 2]
    device = DeviceBudget(budget, steering, times, learns=True, quotas=quotas)
    for requests in (8, 8, 4, 4, 4):
        greedy = np.ones(requests, dtype=bool)
        device.begin_step(greedy)
        device.drafted(batch_of(TREES[2], requests), greedy, None)
        device.end_step(requests, requests, 0, 1, prefills=False, missed=False, trees=True)
    assert budget.widths == [2, 2, NODES]
