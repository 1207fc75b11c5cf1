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
