"""Predicting whether drafting pays off for a batch of another size."""

from collections import deque

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_adaptive_tree.budget.allocation import outcome
from vllm_adaptive_tree.budget.curve import Curve

TREES, RECENT = 64, 512
"""How many trees are remembered, of whole steps, and for how many steps."""
ENOUGH = 16
"""Trees that say something of a batch."""
DEEPEST = 4
"""Levels that are thought of: a batch to which a few do not pay is none for more."""


class Foresight:
    """Whether drafting would pay in a batch of another size, by the trees of recent steps: their nodes' chances say
    what such a batch would accept, and the costs what it would take.

    It looks at past steps only, so whatever follows from it asks nothing of a tree that is not drawn yet.
    """

    def __init__(self, *, sampled: bool):
        """`sampled`: as in `allocate`."""
        self.sampled = sampled
        self.seen: deque[tuple[int, Tensor, Tensor]] = deque()  # step, chance [R, N], depth [R, N]

    def see(self, step: int, chance: Tensor, depth: Tensor) -> None:
        """Trees [R, N] of a step: the chance of each node, 0 where there is none, and its depth."""
        self.seen.append((step, chance[:TREES], depth[:TREES]))
        while sum(len(one) for _, one, _ in self.seen) - len(self.seen[0][1]) >= TREES:
            self.seen.popleft()

    def best_rate(self, requests: int, step: int, *, verify: Curve, overhead: float, level: float) -> float | None:
        """Tokens per second of `requests` such trees, as deep as is best; None where too few are known.

        Args:
            step: the present one.
            verify, overhead, level: seconds of a verification by rows, of the rest of a step, and of a draft level.
        """
        recent = [tree for then, *trees in self.seen if step - then <= RECENT for tree in zip(*trees, strict=True)]
        recent = recent[-max(requests, ENOUGH) :]
        if len(recent) < ENOUGH:
            return None
        chance, depth = (pad_sequence(list(part), batch_first=True) for part in zip(*recent, strict=True))
        chance = chance.cummin(1).values
        places = torch.arange(-(-len(recent) // requests) * requests) % len(recent)  # the last batch begins again
        chance, depth = chance[places], depth[places]
        return max(
            self._rate(chance.masked_fill(depth > levels, 0.0), requests, verify, overhead + levels * level)
            for levels in range(1, 1 + DEEPEST)
        )

    def _rate(self, chance: Tensor, requests: int, verify: Curve, spent: float) -> float:
        tokens = seconds = 0.0
        for batch in chance.split(requests):
            more, longer = outcome(batch, verify=verify, spent=spent, sampled=self.sampled)
            tokens, seconds = tokens + more, seconds + longer
        return tokens / seconds
