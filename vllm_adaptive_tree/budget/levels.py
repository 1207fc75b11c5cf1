from collections.abc import Sequence
from itertools import accumulate

from vllm_adaptive_tree.budget.calibration import DEPTHS

STEP = 0.02
"""Least weight of the newest step in a running average."""
FIRST = 4
"""Steps that draft all levels, at the beginning."""
EVERY, DEEPER = 32, 2
"""Of so many steps one drafts so many levels more: a level that is never drafted is never judged."""
ALL = 1 << 30


class Levels:
    """How many levels of its trees a batch of one size drafts: from past steps, those that paid for themselves.

    A level pays with the nodes of its depth that the batch went on to verify.
    """

    def __init__(self) -> None:
        self.worth = [0.0] * DEPTHS  # tokens that each depth brought, less what it cost in tokens
        self.judged = [0] * DEPTHS
        self.steps = 0
        self.usual = 0
        """Levels of this step and of those around it; what is drafted below them stands for `EVERY` steps."""
        self.deeper = True
        """Whether this step drafts levels that may not pay."""

    def next(self) -> int:
        """The most levels of this step."""
        first, again = self.steps < FIRST, self.steps % EVERY == 0
        self.deeper = first or again
        self.steps += 1
        worth = list(accumulate(self.worth))
        self.usual = 1 + worth.index(max(worth))
        most = self.usual + DEEPER * again
        return ALL if first or most >= DEPTHS else most  # the last depth stands for all below it

    def observe(self, tokens: Sequence[float], cost: Sequence[float], drafted: int) -> None:
        """What each depth was expected to bring and what it cost in tokens, both [DEPTHS]; levels `drafted`."""
        for place in range(min(drafted, DEPTHS)):
            self.judged[place] += 1
            weight = STEP if place < self.usual else 1 - (1 - STEP) ** EVERY
            weight = max(weight, 1 / self.judged[place])  # at first the plain average
            self.worth[place] += weight * (tokens[place] - cost[place] - self.worth[place])
