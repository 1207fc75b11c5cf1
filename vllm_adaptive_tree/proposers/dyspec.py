"""DySpec: spend the budget on the sampling slots that are most likely to be reached (arXiv 2410.11744)."""

import math

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.proposers import best_first
from vllm_adaptive_tree.proposers.base import Frontier, Proposal, Request, Rows, law, places
from vllm_adaptive_tree.proposers.best_first import Candidates, Growth
from vllm_adaptive_tree.proposers.children import draw_children

FILL = 0.75
LOWEST, HIGHEST = 1e-6, 0.9


class DySpec:
    """Slots in decreasing order of their value, until it falls below `threshold` or the budget is full.

    The value of a slot, known before its token is drawn, is the probability that verification comes to it: the path
    above accepted and the earlier siblings rejected, both estimated by the draft,

        v = prod_path q(t) * (1 - sum_{earlier siblings} q(s)).

    With `threshold` 0 the tree is that of Algorithm 1 (the heap, with the depth limited), otherwise that of Algorithm
    2, cut in slot order where it is over the budget. Either is grown level by level: for one order of draws at every
    node the heap's tree is the n best slots. The caps are legal because they look at revealed tokens only.
    """

    kinds: tuple[Kind, ...] = ("without_replacement",)

    def __init__(self, *, max_depth: int, max_children: int, threshold: float):
        self.max_depth, self.most_children, self.threshold = max_depth, max_children, threshold
        self.kind: Kind = "without_replacement"

    def begin(self, rows: Rows, *, nodes: int, request: Request) -> Growth:
        root = torch.zeros_like(law(rows.logits[:, :, 0], request.temperature))
        candidates = self._slots(rows.logits, root, 0, request)
        return best_first.begin(candidates, nodes=nodes, request=request)

    def growing(self, growth: Growth) -> Tensor:
        return self._expand(growth).any(1) & (growth.level < self.max_depth)

    def frontier(self, growth: Growth) -> Frontier:
        return best_first.frontier(growth, self._expand(growth))

    def extend(self, growth: Growth, rows: Rows) -> Growth:
        expand = self._expand(growth)
        path = best_first.paths_above(growth, expand, rows.logits.shape[1])
        candidates = self._slots(rows.logits, path, growth.level, growth.request)
        return best_first.extend(growth, candidates, expand=expand)

    def _expand(self, growth: Growth) -> Tensor:
        """A node's path probability is the value of its first child's slot."""
        return best_first.expandable(growth) & (growth.path >= self._lowest)

    def finish(self, growth: Growth) -> Proposal:
        return best_first.finish(growth)

    def steer(self, fill: float) -> None:
        """Move the threshold after a step whose trees filled this share of the budget, towards three quarters."""
        self.threshold = min(max(self.threshold * math.exp(fill - FILL), LOWEST), HIGHEST)

    @property
    def _lowest(self) -> float:
        return math.log(self.threshold) if self.threshold > 0 else -math.inf

    def _slots(self, logits: Tensor, path: Tensor, level: int, request: Request) -> Candidates:
        """All slots below the frontier of a level, whose log path probabilities are `path` [R, W]."""
        q = law(logits, request.temperature[:, None])  # [R, W, V]
        place = places(level, logits)
        drawn = torch.full_like(place, min(self.most_children, q.shape[-1]))
        tokens = draw_children(self.kind, q, drawn, self.most_children, request.noise.at(place), None)  # [R, W, k]
        chance = q.gather(2, tokens.clamp(min=0)).masked_fill(tokens < 0, 0.0)
        before = 1 - (chance.cumsum(2) - chance)  # nothing of the earlier siblings is accepted
        # Rounding must not put a sibling before an earlier one, nor a child's slot before its parent's.
        value = path[:, :, None] + before.clamp(min=0).cummin(2).values.log()
        value = value.masked_fill((tokens < 0) | (value < self._lowest), -torch.inf)
        column = torch.arange(path.shape[1], device=path.device)[None, :, None].expand_as(tokens)
        below = torch.minimum(path[:, :, None] + chance.log(), value)
        return Candidates(tokens.flatten(1), column.flatten(1), value.flatten(1), below.flatten(1), drawn)
