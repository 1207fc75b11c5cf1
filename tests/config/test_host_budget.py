"""What the budget of Model Runner V1 hears of a step's times."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_adaptive_tree.budget import Budget, Plan
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.engine.startup.measuring import Times
from vllm_adaptive_tree.engine.v1 import budget as module
from vllm_adaptive_tree.engine.v1 import startup_costs
from vllm_adaptive_tree.engine.v1.budget import HostBudget
from vllm_adaptive_tree.engine.v1.clock import PhaseClock


def test_the_times_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What grows with the rows is verification: without acceptance, rows of 49,152 logits would look too cheap.
    Planning is no time of a step: a trial plans in each, and a draft that pays in few."""
    now, told = [0.0], list[tuple[float, float, float]]()

    class Slow(Budget):
        def begin(self, greedy: Any) -> Plan:
            now[0] += 5.0
            return self.plan

        def observe_step(self, rows: int, context: float, forward: float, rest: float, **_: Any) -> None:
            told.append((context, forward, rest))

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(module, "number_from_rank_0", lambda number: number)
    budget = HostBudget(Slow(sampled=False), ThresholdController(SimpleNamespace(by_place=False), False), PhaseClock())
    step: Any = SimpleNamespace(row_count=[1, 3], computed=[2, 6])
    for _ in range(2):
        budget.begin_step()
        budget.clock.seconds.update(verify=2.0, accept=0.5, commit=0.25)
        now[0] += 3.0
        budget.begin_levels([True, True])
        budget.end_step(step)
    assert told == [(5.0, 2.75, 0.25)] * 2, "three of four rows have a context of 6"


@pytest.mark.parametrize(("longest", "tokens"), [(4096, 1024), (512, 504)])
def test_a_context_is_measured_as_a_cost_of_each_row(
    longest: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[int, ...]]()

    def fastest(forwards: Any, **_: Any) -> Times:
        asked[:] = [forward.args[1:] for forward in forwards]
        rows = 8 * tokens  # of which each costs a microsecond, per token
        return Times([0.01 + (rows * 1e-6 if given == (8, tokens) else 0.0) for given in asked], 1.0)

    monkeypatch.setattr(startup_costs, "fastest_on_rank_0", fastest)
    runner = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64), max_model_len=longest, drafter=None, device=None
    )
    costs = startup_costs.measured_costs(runner, 4).costs
    assert (8, tokens) in asked
    assert costs.context == pytest.approx(1e-6)


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
