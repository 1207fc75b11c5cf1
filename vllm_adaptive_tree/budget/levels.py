from collections.abc import Sequence
from itertools import accumulate

from vllm_adaptive_tree.budget.calibration import DEPTHS

STEP = 0.02
"""Least weight of the newest step in a running average."""
FIRST = 4
"""Steps that draft all levels, at the beginning."""
EVERY, SELDOM, DEEPER = 32, 128, 2
"""Of so many steps one drafts so many levels more: a level that is never drafted is never judged. Each time that it
changes nothing, the next is twice as far off, up to `SELDOM`."""
ALL = 1 << 30


class Levels:
    """How many levels of its trees a batch of one size drafts: from past steps, those that paid for themselves.

    A level pays with the nodes of its depth that the batch went on to verify.
    """

    def __init__(self) -> None:
        self.worth = [0.0] * DEPTHS  # tokens that each depth brought, less what it cost in tokens
        self.judged = [0] * DEPTHS
        self.steps = 0
        self.again, self.pause = 0, EVERY
        """The next step that drafts more, and how long it waits for that."""
        self.usual = 0
        """The levels when one last did."""
        self.deeper = True
        """Whether this step drafts levels that may not pay."""

    def next(self) -> int:
        """The most levels of this step."""
        first, again = self.steps < FIRST, self.steps == self.again
        self.deeper = first or again
        worth = list(accumulate(self.worth))
        most = 1 + worth.index(max(worth))
        if again:
            self.pause = min(2 * self.pause, SELDOM) if most == self.usual else EVERY
            self.again, self.usual = self.steps + self.pause, most
        self.steps += 1
        most += DEEPER * again
        return ALL if first or most >= DEPTHS else most  # the last depth stands for all below it

    def observe(self, tokens: Sequence[float], cost: Sequence[float], drafted: int) -> None:
        """What each depth was expected to bring and what it cost in tokens, both [DEPTHS]; levels `drafted`."""
        for place in range(min(drafted, DEPTHS)):
            self.judged[place] += 1
            weight = max(STEP, 1 / self.judged[place])  # at first the plain average
            self.worth[place] += weight * (tokens[place] - cost[place] - self.worth[place])
