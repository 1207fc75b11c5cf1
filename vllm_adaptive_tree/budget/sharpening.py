from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.budget.reading import MOST, member, number, short

LOWEST, HIGHEST = 0.2, 2.0
MEMORY = 1000.0
"""Observations after which an old one weighs 1/e."""
TOGETHER = 16
"""Tokens of one Newton step."""
EACH = 4
"""The most of one step of the engine: a large batch has soon said enough, and asking all of it costs time."""
PRIOR = 30.0
"""Of the initial temperature, in squared logits: about as much as so many tokens say, at a variance of 1."""
BOUND = 8.0
"""The most logits by which one token may lie off: a token that the draft holds for impossible says nothing more."""


class Sharpening:
    """The temperature at which the draft's law says best what a greedy target takes.

    A greedy target takes its best token, so the draft's own law is too flat for the chances of its candidates. Maximum
    likelihood of the inverse temperature b: the slope of a token's log law is its logit less the mean logit under the
    law, the curvature their variance; one Newton step for each batch of tokens, older ones fading.
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
        """At nodes with the draft's `logits`, each [V], a greedy target took `token`. Of many nodes some count, others
        in each call. They wait until there are enough to be worth a Newton step."""
        every = max(1, -(-len(logits) // EACH))
        self.turn += 1
        self.waiting += list(zip(logits, token, strict=True))[self.turn % every :: every]
        if len(self.waiting) >= TOGETHER:
            rows, took = torch.stack([one for one, _ in self.waiting]), torch.tensor([one for _, one in self.waiting])
            self.waiting = []
            self.learn(*self.measured(rows, took, torch.ones_like(took, dtype=torch.bool)).tolist())

    def measured(self, logits: Tensor, token: Tensor, among: Tensor) -> Tensor:
        """What `learn` wants to know, [3] on their device; of those `among` [M] them."""
        logits = (logits.float() - logits.amax(-1, keepdim=True)).clamp_(min=-1e4)  # banned tokens: -inf
        law = torch.softmax(logits * self.inverse, -1)
        mean = (law * logits).sum(-1)
        variance = (law * logits.square()).sum(-1) - mean.square()
        slope = (logits.gather(-1, token.clamp(min=0)[:, None])[:, 0] - mean).clamp(-BOUND, BOUND)
        return torch.stack([torch.where(among, one, 0.0).sum() for one in (torch.ones_like(slope), slope, variance)])

    def learn(self, tokens: float, slope: float, variance: float) -> None:
        """One step for so many tokens."""
        self.information = self.information * (1 - tokens / MEMORY) + variance
        inverse = self.inverse + slope / self.information
        self.inverse = min(max(inverse, 1 / HIGHEST), 1 / LOWEST)

    def to_json(self) -> dict[str, float]:
        inverse, information = short([self.inverse, self.information])
        return {"inverse": inverse, "information": information}

    def restore(self, data: Any) -> None:
        """What `to_json` gave. Raises ValueError, and changes nothing, where `data` is something else."""
        inverse = number(member(data, "inverse"), 1 / HIGHEST, 1 / LOWEST)
        self.information = number(member(data, "information"), 1e-3, MOST)
        self.inverse = inverse
