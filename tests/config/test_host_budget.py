"""What the budget of Model Runner V1 hears of a step's times."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_adaptive_tree.budget import Budget, Plan
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.engine.v1 import budget as module
from vllm_adaptive_tree.engine.v1.budget import HostBudget
from vllm_adaptive_tree.engine.v1.clock import PhaseClock


def test_the_times_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What grows with the rows is verification: without acceptance, rows of 49,152 logits would look too cheap.
    Planning is no time of a step: a trial plans in each, and a draft that pays in few."""
    now, told = [0.0], list[tuple[float, float]]()

    class Slow(Budget):
        def begin(self, greedy: Any) -> Plan:
            now[0] += 5.0
            return self.plan

        def observe_step(self, rows: int, context: int, forward: float, rest: float, **_: Any) -> None:
            told.append((forward, rest))

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(module, "number_from_rank_0", lambda number: number)
    budget = HostBudget(Slow(sampled=False), ThresholdController(SimpleNamespace(by_place=False), False), PhaseClock())
    step: Any = SimpleNamespace(row_count=[1, 1], computed=[3, 4])
    for _ in range(2):
        budget.begin_step()
        budget.clock.seconds.update(verify=2.0, accept=0.5, commit=0.25)
        now[0] += 3.0
        budget.begin_levels([True, True])
        budget.end_step(step)
    assert told == [(2.75, 0.25)] * 2


def test_a_look_up_that_finds_nothing_is_a_step_of_its_own() -> None:
    """Not one that drafted: the planner hears of an empty tree of each request, and nothing is verified."""
    told = list[tuple[Any, ...]]()

    class Spy(Budget):
        def observe_trees(self, value: Any, depth: Any, greedy: Any, plan: Plan, *, level: Any = None) -> None:
            told.append((value.shape, value.any(), depth.any(), level.any(), greedy))

    budget = HostBudget(Spy(sampled=False), ThresholdController(SimpleNamespace(by_place=False), False), PhaseClock())
    budget.begin_step()
    budget.budget.verifying = 7
    budget.found_nothing([True, False], 5)
    assert told == [((2, 5), False, False, False, [True, False])]
    assert budget.has_lookup_trees
    assert not budget.verifying
