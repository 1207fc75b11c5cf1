"""Fitting the draft temperature to what greedy targets take."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.budget.reading import MOST, member, number, short

LOWEST, HIGHEST = 0.2, 2.0
MEMORY = 1000.0
"""Observations after which an old one has weight 1/e."""
TOGETHER = 16
"""Tokens per Newton step."""
EACH = 4
"""Upper bound of the tokens taken from one engine step: a large batch gives enough, and using all of it costs time."""
PRIOR = 30.0
"""Prior information of the initial temperature, in squared logits: worth that many tokens at variance 1."""
BOUND = 8.0
"""Clamp on a token's deviation, in logits: a token the draft considers impossible carries no more information."""


class Sharpening:
    """The draft temperature that best predicts the tokens of a greedy target.

    A greedy target takes its argmax, so the draft's raw distribution is too flat as a prediction. This is a maximum
    likelihood fit of the inverse temperature b: the slope of a token's log probability is its logit minus the mean
    logit, the curvature is their variance; one Newton step per batch of tokens, with exponential forgetting.
    """

    def __init__(self, temperature: float):
        self.inverse = 1 / temperature
        self.information = PRIOR
        self.waiting: list[tuple[Tensor, int]] = []
        self.turn = 0

    @property
    def temperature(self) -> float:
        return 1 / self.inverse

    def observe(self, logits: Sequence[Tensor], token: Sequence[int]) -> None:
        """Record the `token` that a greedy target took at nodes with the draft's `logits`, each [V].

        Of many nodes a rotating subset is used. They are collected until there are enough for a Newton step.
        """
        every = max(1, -(-len(logits) // EACH))
        self.turn += 1
        self.waiting += list(zip(logits, token, strict=True))[self.turn % every :: every]
        if len(self.waiting) >= TOGETHER:
            rows, took = torch.stack([one for one, _ in self.waiting]), torch.tensor([one for _, one in self.waiting])
            self.waiting = []
            self.learn(*self.measured(rows, took, torch.ones_like(took, dtype=torch.bool)).tolist())

    def measured(self, logits: Tensor, token: Tensor, among: Tensor) -> Tensor:
        """The arguments of `learn` as a tensor [3] on the logits' device; of the nodes selected by `among` [M]."""
        logits = (logits.float() - logits.amax(-1, keepdim=True)).clamp_(min=-1e4)  # banned tokens: -inf
        probs = torch.softmax(logits * self.inverse, -1)
        mean = (probs * logits).sum(-1)
        variance = (probs * logits.square()).sum(-1) - mean.square()
        slope = (logits.gather(-1, token.clamp(min=0)[:, None])[:, 0] - mean).clamp(-BOUND, BOUND)
        return torch.stack([torch.where(among, one, 0.0).sum() for one in (torch.ones_like(slope), slope, variance)])

    def learn(self, tokens: float, slope: float, variance: float) -> None:
        """One Newton step from this many tokens."""
        self.information = self.information * (1 - tokens / MEMORY) + variance
        inverse = self.inverse + slope / self.information
        self.inverse = min(max(inverse, 1 / HIGHEST), 1 / LOWEST)

    def to_json(self) -> dict[str, float]:
        inverse, information = short([self.inverse, self.information])
        return {"inverse": inverse, "information": information}

    def restore(self, data: Any) -> None:
        """Load the output of `to_json`. Raises ValueError, changing nothing, for other data."""
        inverse = number(member(data, "inverse"), 1 / HIGHEST, 1 / LOWEST)
        self.information = number(member(data, "information"), 1e-3, MOST)
        self.inverse = inverse
