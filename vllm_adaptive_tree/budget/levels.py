"""How many levels to draft."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from vllm_adaptive_tree.budget.calibration import DEPTHS
from vllm_adaptive_tree.budget.reading import member, numbers, short

STEP = 0.15
"""Least weight of the newest judged step in a running average."""
FIRST = 4
"""Steps that draft all levels, at the beginning."""
JUDGED, EVERY, DEEPER = 8, 32, 2
"""Of so many steps one is judged; of so many one drafts so many levels more: a level that is never drafted is never
judged."""
ALL = 1 << 30


class Levels:
    """How many levels of its trees a batch of one size drafts: from past steps, those that paid for themselves.

    A level is judged beside the best that the same step could have done without it: its nodes take the rows of others.
    """

    def __init__(self) -> None:
        self.worth = [0.0] * DEPTHS  # of each level: log of the tokens per second with it over those without
        self.judged = [0] * DEPTHS
        self.steps = 0
        self.usual = 0
        """Levels of this step and of those around it; a trial of one below them stands for `EVERY` steps."""
        self.deeper = True
        """Whether this step drafts levels that may not pay."""
        self.judges = True
        """Whether this step is judged."""

    def next(self) -> int:
        """The most levels of this step."""
        first, again = self.steps < FIRST, self.steps % EVERY == 0
        self.deeper = first or again
        self.judges = self.deeper or self.steps % JUDGED == 0
        self.steps += 1
        worth = list(accumulate(self.worth))
        self.usual = 1 + worth.index(max(worth))
        most = self.usual + DEEPER * again
        return ALL if first or most >= DEPTHS else most  # the last depth stands for all below it

    def observe(self, rates: Sequence[float]) -> None:
        """The tokens per second that a step would have brought with its first level, its first two, ..; all > 0."""
        for place, (without, within) in enumerate(pairwise(rates[:DEPTHS]), start=1):
            self.judged[place] += 1
            weight = STEP if place < self.usual else 1 - (1 - STEP) ** (EVERY // JUDGED)
            weight = max(weight, 1 / self.judged[place])  # at first the plain average
            self.worth[place] += weight * (math.log(within / without) - self.worth[place])

    def to_json(self) -> dict[str, Any]:
        return {"worth": short(self.worth), "judged": self.judged}

    def restore(self, data: Any) -> None:
        """What `to_json` gave: the first steps, which draft all levels, are over. Raises ValueError, and changes
        nothing, where `data` is something else."""
        worth = numbers(member(data, "worth"), DEPTHS, least=-100, most=100)
        judged = [int(count) for count in numbers(member(data, "judged"), DEPTHS)]
        self.worth, self.judged, self.steps = worth, judged, FIRST if any(judged) else 0
