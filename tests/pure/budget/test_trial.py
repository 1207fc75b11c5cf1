"""Trials of a resting batch by a few of its requests."""

import pytest
import torch

from tests.pure.budget import curve
from vllm_adaptive_tree.budget import Costs, Planner, Turns, planner

REQUESTS, LEVEL = 16, 0.05
"""Seconds of a draft level for one request; a step without drafts takes one."""


def trials(steps: int = 1500, chance: float = 0.1) -> tuple[list[float], list[list[bool]]]:
    """Seconds that each trial has drafted, and the requests that drafted, by step."""
    costs = Costs(curve((1, 1.0), (1000, 1.0)), curve((1, LEVEL), (1000, 1000 * LEVEL)))
    budget, turns, greedy = Planner(costs, sampled=False), Turns(), [True] * REQUESTS
    lost, drafted, rested = list[float](), list[list[bool]](), True
    for _ in range(steps):
        plan = budget.begin(greedy)
        if plan.levels:
            chosen, levels = turns.chosen(greedy, plan.few), min(8, plan.levels)
            lost += [0.0] if rested else []
            lost[-1] += levels * LEVEL * sum(chosen)
            drafted.append(chosen)
            depth = torch.arange(1, levels + 1).expand(sum(chosen), levels)
            trees = chance ** depth.double(), depth, torch.ones(sum(chosen), dtype=torch.bool)
            budget.observe_trees(*trees, plan)
            budget.share(*trees, rows=REQUESTS - sum(chosen))
        rested = not plan.levels
    return lost, drafted


def test_a_trial_takes_an_eighth_of_what_a_whole_batch_would_take(monkeypatch: pytest.MonkeyPatch):
    """0.2 plain steps in place of 1.6."""
    few, _ = trials()
    monkeypatch.setattr(planner, "trial_size", lambda requests: 0)
    whole, _ = trials()
    assert len(few) == len(whole) > 3, "it is tried as often"
    assert few[0] == pytest.approx(0.2)
    assert sum(few) == pytest.approx(sum(whole) / 8)


def test_every_request_has_its_turn():
    _, drafted = trials(20000)
    assert {sum(step) for step in drafted} == {2}
    assert len({tuple(step) for step in drafted[: REQUESTS // 2]}) == min(len(drafted), REQUESTS // 2)


@pytest.mark.parametrize(("sampled", "greedy"), [(1, 31), (16, 16), (30, 2), (1, 2)])
def test_both_kinds_are_tried(sampled: int, greedy: int):
    kinds = [False] * sampled + [True] * greedy
    chosen = Turns().chosen(kinds, max(2, len(kinds) // 8))
    assert 1 <= sum(chosen[:sampled]) <= max(2, sampled // 8)
    assert 1 <= sum(chosen[sampled:]) <= max(2, greedy // 8)


def test_a_trial_that_wins_is_followed_by_the_whole_batch():
    """What two requests have brought is believed of all, after four steps."""
    costs = Costs(curve((1, 1.0), (1000, 1.0)), curve((1, 2.0), (1000, 2.0)))
    budget, greedy = Planner(costs, sampled=False), [True] * REQUESTS
    few = list[int]()
    for step in range(80):
        if step == 60:
            budget.costs = Costs(costs.verify, curve((1, 0.01), (1000, 0.01)))
        plan = budget.begin(greedy)
        if plan.levels:
            few.append(plan.few)
            count, levels = plan.few or REQUESTS, min(8, plan.levels)
            depth = torch.arange(1, levels + 1).expand(count, levels)
            budget.observe_trees(0.9 ** depth.double(), depth, torch.ones(count, dtype=torch.bool), plan)
    assert few[:4] == [2] * 4
    assert set(few[4:]) == {0}
