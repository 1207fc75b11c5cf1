import torch
from torch import Tensor

from vllm_adaptive_tree.budget.calibration import DEPTHS

STEP = 0.02
"""Least weight of the newest step in a running average."""
EVERY = 32
"""Of so many steps one drafts all levels, and so do the first few: a level that is never drafted is never judged."""
FIRST = 4
ALL = 1 << 30


class Levels:
    """How many levels of its trees a batch of one size drafts: from past steps, those that paid for themselves.

    A level pays with the nodes of its depth that the batch went on to verify.
    """

    def __init__(self) -> None:
        self.worth = torch.zeros(DEPTHS).double()  # tokens that each depth brought, less what it cost in tokens
        self.judged = torch.zeros(DEPTHS).double()
        self.steps = 0
        self.everything = True
        """Whether this step drafts all levels."""

    def next(self) -> int:
        """The most levels of this step."""
        self.everything = self.steps < FIRST or self.steps % EVERY == 0
        self.steps += 1
        most = 1 + int(self.worth.cumsum(0).argmax())
        return ALL if self.everything or most == DEPTHS else most  # the last depth stands for all below it

    def observe(self, tokens: Tensor, cost: Tensor, drafted: int) -> None:
        """What each depth was expected to bring and what it cost in tokens, both [DEPTHS]; levels `drafted`."""
        seen = torch.arange(DEPTHS) < drafted
        self.judged += seen
        weight = (1 / self.judged.clamp(min=1)).clamp(min=STEP)  # at first the plain average
        self.worth = torch.where(seen, self.worth + weight * (tokens - cost - self.worth), self.worth)
