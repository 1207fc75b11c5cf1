import torch
from torch import Tensor

DEPTHS, BINS = 16, 24
LOWEST = 1e-4
"""Values below this are of no use and share a bin."""
PRIOR = 8.0
"""Observations that the draft's own probability counts for in every bin."""
MEMORY = 300.0
"""Observations of a bin after which an old one weighs 1/e."""


class Calibration:
    """How often nodes of a depth and value were accepted, so that a value becomes a chance.

    A function of past steps, of the depth and of the value alone, and never falling with the value: a cut by calibrated
    values asks nothing of the drawn token that the value does not.
    """

    def __init__(self) -> None:
        # [DEPTHS, BINS]; a bin starts as its nodes' own predictions
        centre = LOWEST ** (1 - (torch.arange(BINS).double() + 0.5) / BINS)
        self.hits = (PRIOR * centre).expand(DEPTHS, BINS).clone()
        self.trials = torch.full((DEPTHS, BINS), PRIOR).double()
        self.predicted = self.observed = 0.0
        """Sums over all nodes verified so far: what was expected of them, and what was accepted."""

    def __call__(self, value: Tensor, depth: Tensor) -> Tensor:
        """The chance [...] that a node of this value and depth (1: below the root) is accepted."""
        chance = (self.hits / self.trials).cummax(1).values  # never falling with the value
        chance = torch.nn.functional.pad(chance, (1, 1))
        chance[:, 0], chance[:, -1] = 0.0, chance[:, -2]
        place = _place(value)  # between bin centres
        left = place.floor().clamp(0, BINS).long()
        row = (depth - 1).clamp(0, DEPTHS - 1)
        low, high = chance[row, left], chance[row, left + 1]
        return torch.where(value > 0, low + (high - low) * (place - left).clamp(0, 1), 0.0)

    def observe(self, value: Tensor, depth: Tensor, accepted: Tensor) -> None:
        """Nodes [M] that were verified, and which of them (bool) were accepted."""
        if not len(value):
            return
        self.predicted += float(self(value, depth).sum())
        self.observed += float(accepted.sum())
        bin_ = (_place(value) - 0.5).floor().clamp(0, BINS - 1).long()
        cell = (depth - 1).clamp(0, DEPTHS - 1) * BINS + bin_
        new = torch.zeros_like(self.trials).view(-1).index_add_(0, cell, torch.ones_like(value, dtype=torch.float64))
        hit = torch.zeros_like(self.trials).view(-1).index_add_(0, cell, accepted.double())
        fade = torch.exp(-new / MEMORY)
        self.trials = (self.trials.view(-1) * fade + new).view_as(self.trials)
        self.hits = (self.hits.view(-1) * fade + hit).view_as(self.hits)


def _place(value: Tensor) -> Tensor:
    """Where a value lies among the bin centres: 1 at the first, BINS at the last."""
    return BINS * (1 - value.double().clamp(LOWEST, 1).log() / torch.tensor(LOWEST).double().log()) + 0.5
