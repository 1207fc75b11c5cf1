"""DySpec: spend the budget on the sampling slots that are most likely to be reached (arXiv 2410.11744)."""

import math
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.options import count, number, one_of
from vllm_adaptive_tree.proposers.base import rng_keys, softmax_at
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, Level, best_candidates, packed
from vllm_adaptive_tree.proposers.children import draw_children
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE, MethodOptions, Steered, draft_temperature

TARGET_FILL = 0.75  # of the node budget
MIN_THRESHOLD, MAX_THRESHOLD = 1e-6, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DySpecOptions(MethodOptions):
    mode: str = one_of("threshold", "threshold", "heap")
    threshold: float | Literal["auto"] = number("auto", 0, 1, "auto", what="the smallest slot value")
    """Smallest slot value; "auto": adjusted between steps so that trees fill three quarters of the budget."""
    draft_temperature: float | Literal["auto"] = draft_temperature("auto", "auto")
    """Temperature of the distribution that children are drawn from; "auto": a sampled request's own, 0.6 for a greedy
    one."""
    max_children: int = count(16)
    max_depth: int = count(16)

    @property
    def steered(self) -> Steered:
        return Steered(fill=self.mode == "threshold" and self.threshold == "auto")

    def temperature(self, own: float, fitted: float = GREEDY_DRAFT_TEMPERATURE) -> float:
        if self.draft_temperature != "auto":
            return float(self.draft_temperature)
        return own if own > 0 else GREEDY_DRAFT_TEMPERATURE


class DySpec(BestFirst):
    """Fill sampling slots in decreasing order of value, until it falls below `threshold` or the budget is used up.

    The value of a slot, known before its token is drawn, is the draft's estimate of the probability that verification
    reaches it: the path above accepted and the earlier siblings rejected,

        v = prod_path q(t) * (1 - sum_{earlier siblings} q(s)).

    With `threshold` 0 the tree is that of Algorithm 1 (the heap, with limited depth), otherwise that of Algorithm 2,
    truncated in slot order to the budget. Both are grown level by level: for a given order of draws at every node, the
    heap's tree is the n best slots. The limits are legal because they depend only on tokens generated earlier.
    """

    Options = DySpecOptions
    fused = "vllm_adaptive_tree.kernels.proposers:FusedDySpec"
    kinds = ("without_replacement",)

    def __init__(self, *, max_depth: int, max_children: int, threshold: float):
        self.max_depth, self.max_children, self.threshold = max_depth, max_children, threshold

    @classmethod
    def build(cls, options: DySpecOptions, *, nodes: int) -> Self:
        threshold = min(1 / nodes, MAX_THRESHOLD) if options.threshold == "auto" else options.threshold
        return cls(
            max_depth=options.max_depth,
            max_children=options.max_children,
            threshold=0.0 if options.mode == "heap" else threshold,
        )

    def expand(self, level: Level, worst: Tensor, gain: Tensor) -> Tensor:
        """Nodes to expand: a node's path probability is the value of its first child slot."""
        return level.path > worst

    def front(self, level: Level, expand: Tensor) -> Level:
        return packed(level, expand)

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        """All slots below the frontier."""
        request, path = growth.request, growth.front.path[:, : logits.shape[1]]
        q = softmax_at(logits, request.temperature[:, None])  # [R, W, V]
        keys = rng_keys(growth.level, logits)
        fanout = min(self.max_children, q.shape[-1])
        num_planned = torch.full_like(keys, fanout)
        rng = request.rng.fold_in(keys)
        tokens = draw_children(self.kind, q, num_planned, self.max_children, rng, None)  # [R, W, k]
        chance = q.gather(2, tokens.clamp(min=0)).masked_fill(tokens < 0, 0.0)
        # All earlier siblings rejected. Its own draw is in no sum: rounding would let a value see it.
        before = 1 - torch.nn.functional.pad(chance[..., :-1].cumsum(2), (1, 0))
        # Rounding must not sort a sibling before an earlier one, nor a child's slot before its parent's.
        value = path[:, :, None] + before.clamp(min=0).cummin(2).values.log()
        value = value.masked_fill((tokens < 0) | (value < self._min_value), -torch.inf)
        column = torch.arange(path.shape[1], device=path.device)[None, :, None].expand_as(tokens)
        below = torch.minimum(path[:, :, None] + chance.log(), value)
        below = below.masked_fill(below < self._min_value, -torch.inf)
        slots = Candidates(tokens.flatten(1), column.flatten(1), value.flatten(1), below.flatten(1), fanout)
        return best_candidates(slots, growth.nodes)

    def steer(self, fill: float) -> None:
        """Adjust the threshold after a step whose trees, before pruning, filled this fraction of the node budget."""
        self.threshold = min(max(self.threshold * math.exp(fill - TARGET_FILL), MIN_THRESHOLD), MAX_THRESHOLD)

    @property
    def _min_value(self) -> float | Tensor:
        if isinstance(self.threshold, Tensor):
            return self.threshold.log()
        return math.log(self.threshold) if self.threshold > 0 else -math.inf
