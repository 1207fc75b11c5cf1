"""Costs that were measured wrongly: live steps say what is true, and the batch rests or drafts as it should."""

from collections.abc import Callable

import pytest
import torch

from vllm_adaptive_tree.budget import Costs, Curve, Planner
from vllm_adaptive_tree.budget.cost import profiled_rows

ROWS = profiled_rows(256)
FEW, MANY = 300, 1200
"""Steps after which a batch that wins drafts, and one that loses rests."""


class Machine:
    """An engine whose steps take what they take, and whose drafts are accepted as they say.

    A verification takes `fixed` seconds and more beyond `free` rows; a draft level a share of a plain step.
    """

    def __init__(self, *, requests: int, chance: float, level: float, free: int = 16, row: float = 0.004):
        self.requests, self.chance, self.free, self.row = requests, chance, free, row
        self.level = level * self.verify(requests)

    def verify(self, rows: float) -> float:
        return 0.1 + self.row * max(0.0, rows - self.free)

    def profile(self, verify: "Callable[[Machine, int], float]", draft: float) -> Costs:
        """Measured off by these factors: of a verification by rows, of a draft level."""
        levels = [1, 2, 4, 16]
        return Costs(
            Curve(ROWS, [self.verify(rows) * verify(self, rows) for rows in ROWS]),
            Curve(levels, [self.level * draft] * 4),
        )

    def run(self, planner: Planner, steps: int) -> tuple[list[bool], float]:
        """Steps that drafted, as booleans, and the speed of the last third relative to no drafts."""
        requests, overhead, kept, drafted = self.requests, 0.01, 0, []
        tokens = seconds = plain = 0.0
        for n in range(steps):
            rows = requests + kept
            took = self.verify(rows) + overhead
            brought = requests * (1 + sum(self.chance**d for d in range(1, 1 + kept // requests)))
            brought += (kept % requests) * self.chance ** (1 + kept // requests)
            kept = 0
            plan = planner.begin([True] * requests)
            drafted.append(plan.levels > 0)
            if drafted[-1]:
                levels = min(6, plan.levels)
                depth = torch.arange(1, 1 + levels).expand(requests, levels)
                for _ in range(levels - 1):
                    planner.observe_level(requests, requests, self.level)
                greedy = torch.ones(requests, dtype=torch.bool)
                value = self.chance ** depth.double()
                planner.observe_trees(value, depth, greedy, plan)
                kept = int(planner.share(value, depth, greedy).sum())
                took += levels * self.level
            planner.observe_step(rows, 0, self.verify(rows), overhead, drafted=drafted[-1])
            if n >= steps - steps // 3:
                tokens, seconds = tokens + brought, seconds + took
                plain += brought / requests * (self.verify(requests) + overhead)
        return drafted, plain / seconds


WINS = {
    "alone": {"requests": 1, "chance": 0.8, "level": 0.1},
    "dear levels": {"requests": 1, "chance": 0.93, "level": 0.4},
    "eight": {"requests": 8, "chance": 0.85, "level": 0.05, "free": 32},
}
LOSES = {
    "dear drafts": {"requests": 8, "chance": 0.6, "level": 0.9},
    "dear rows": {"requests": 32, "chance": 0.6, "level": 0.15, "free": 1, "row": 0.02},
    "poor drafts": {"requests": 32, "chance": 0.15, "level": 0.15},
}
WRONG: dict[str, tuple[Callable[[Machine, int], float], float]] = {
    "right": (lambda machine, rows: 1.0, 1.0),
    "verification 3 times": (lambda machine, rows: 3.0, 1.0),
    "verification a third": (lambda machine, rows: 1 / 3, 1.0),
    "drafts 3 times": (lambda machine, rows: 1.0, 3.0),
    "drafts a third": (lambda machine, rows: 1.0, 1 / 3),
    "few rows 3 times": (lambda machine, rows: 3.0 if rows <= 32 else 1.0, 1.0),
    "few rows a third": (lambda machine, rows: 1 / 3 if rows <= 32 else 1.0, 1.0),
    "few rows as dear as many": (lambda machine, rows: machine.verify(max(rows, 96)) / machine.verify(rows), 1.0),
}


def right(load: str) -> float:
    return Machine(**WINS[load]).run(Planner(Machine(**WINS[load]).profile(*WRONG["right"]), sampled=False), 150)[1]


@pytest.fixture(scope="module")
def best() -> dict[str, float]:
    return {load: right(load) for load in WINS}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("load", WINS)
def test_a_batch_that_wins_drafts(load, wrong, best):
    machine = Machine(**WINS[load])
    drafted, faster = machine.run(Planner(machine.profile(*WRONG[wrong]), sampled=False), FEW)
    assert sum(drafted[-100:]) >= 97
    assert faster > 0.85 * best[load] > 1.1


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("load", LOSES)
def test_a_batch_that_loses_rests(load, wrong):
    machine = Machine(**LOSES[load])
    drafted, faster = machine.run(Planner(machine.profile(*WRONG[wrong]), sampled=False), MANY)
    assert sum(drafted[-400:]) < 40
    assert sum(drafted) < 200, "it was soon found"
    assert faster > 0.96
