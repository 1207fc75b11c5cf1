"""DySpec: spend the budget on the sampling slots that are most likely to be reached (arXiv 2410.11744)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.proposers.base import law, places
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Front, Growth, Level, ranked
from vllm_adaptive_tree.proposers.children import draw_children
from vllm_adaptive_tree.proposers.options import (
    GREEDY_DRAFT_TEMPERATURE,
    MethodOptions,
    Steered,
    count,
    is_number,
    one_of,
    option,
    threshold,
)
from vllm_adaptive_tree.trees.tree_batch import EMPTY

FILL = 0.75
LOWEST, HIGHEST = 1e-6, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DySpecOptions(MethodOptions):
    mode: str = one_of("threshold", "threshold", "heap")
    threshold: float | Literal["auto"] = threshold("auto", "the smallest slot value")
    """Smallest slot value; "auto": moved between steps so that trees fill three quarters of the budget."""
    draft_temperature: float = option(0.6, lambda value: is_number(value) and value > 0, "a number above 0")
    max_children: int = count(16)
    max_depth: int = count(16)

    @property
    def steered(self) -> Steered:
        return Steered(fill=self.mode == "threshold" and self.threshold == "auto")

    def temperature(self, own: float, fitted: float = GREEDY_DRAFT_TEMPERATURE) -> float:
        return float(self.draft_temperature)


class DySpec(BestFirst):
    """Slots in decreasing order of their value, until it falls below `threshold` or the budget is full.

    The value of a slot, known before its token is drawn, is the probability that verification comes to it: the path
    above accepted and the earlier siblings rejected, both estimated by the draft,

        v = prod_path q(t) * (1 - sum_{earlier siblings} q(s)).

    With `threshold` 0 the tree is that of Algorithm 1 (the heap, with the depth limited), otherwise that of Algorithm
    2, cut in slot order where it is over the budget. Either is grown level by level: for one order of draws at every
    node the heap's tree is the n best slots. The caps are legal because they look only at tokens generated before.
    """

    Options: ClassVar[type[MethodOptions]] = DySpecOptions
    kinds: tuple[Kind, ...] = ("without_replacement",)

    def __init__(self, *, max_depth: int, max_children: int, threshold: float):
        self.max_depth, self.most_children, self.threshold = max_depth, max_children, threshold
        self.kind: Kind = "without_replacement"

    @classmethod
    def build(cls, options: DySpecOptions, *, nodes: int) -> Self:
        threshold = min(1 / nodes, HIGHEST) if options.threshold == "auto" else options.threshold
        return cls(
            max_depth=options.max_depth,
            max_children=options.max_children,
            threshold=0.0 if options.mode == "heap" else threshold,
        )

    def expand(self, level: Level, worst: Tensor, gain: Tensor) -> Tensor:
        """A node's path probability is the value of its first child's slot."""
        return (level.path > worst) & (level.path >= self._lowest)

    def front(self, level: Level, expand: Tensor) -> Front:
        """Packed to the left: a slot of less value may hold a more probable token."""
        used, column = expand.sort(dim=1, descending=True, stable=True)
        tokens, parent, value, path = (
            x.gather(1, column) for x in (level.tokens, level.parent, level.value, level.path)
        )
        value, path = (x.masked_fill(~used, -torch.inf) for x in (value, path))
        return Front(tokens.masked_fill(~used, EMPTY), parent, value, path)

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        """All slots below the frontier."""
        request, path = growth.request, growth.front.path[:, : logits.shape[1]]
        q = law(logits, request.temperature[:, None])  # [R, W, V]
        place = places(growth.level, logits)
        most = min(self.most_children, q.shape[-1])
        drawn = torch.full_like(place, most)
        tokens = draw_children(self.kind, q, drawn, self.most_children, request.rng.fold_in(place), None)  # [R, W, k]
        chance = q.gather(2, tokens.clamp(min=0)).masked_fill(tokens < 0, 0.0)
        before = 1 - (chance.cumsum(2) - chance)  # nothing of the earlier siblings is accepted
        # Rounding must not put a sibling before an earlier one, nor a child's slot before its parent's.
        value = path[:, :, None] + before.clamp(min=0).cummin(2).values.log()
        value = value.masked_fill((tokens < 0) | (value < self._lowest), -torch.inf)
        column = torch.arange(path.shape[1], device=path.device)[None, :, None].expand_as(tokens)
        below = torch.minimum(path[:, :, None] + chance.log(), value)
        slots = Candidates(tokens.flatten(1), column.flatten(1), value.flatten(1), below.flatten(1), most)
        return ranked(slots, growth.nodes)

    def steer(self, fill: float) -> None:
        """Move the threshold after a step whose trees, before any of them was cut, filled this share of the node
        budget: towards three quarters."""
        self.threshold = min(max(self.threshold * math.exp(fill - FILL), LOWEST), HIGHEST)

    @property
    def _lowest(self) -> float:
        return math.log(self.threshold) if self.threshold > 0 else -math.inf
