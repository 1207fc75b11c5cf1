"""Adaptive trees: slots of the largest learnt probability to be accepted, chosen or drawn as the request's law asks."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.options import count, number
from vllm_adaptive_tree.proposers.acceptance_table import AcceptanceTable
from vllm_adaptive_tree.proposers.base import rng_keys, softmax_at
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, Level, best_candidates, packed
from vllm_adaptive_tree.proposers.children import draw_children
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE, MethodOptions, Steered

SPREAD = 8
"""Tokens over which a distribution is taken to spread, but for its best."""
LEAST_LEFT = 1e-6
"""Least share of a distribution that earlier siblings are taken to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveTreeOptions(MethodOptions):
    lookup: ClassVar[str | None] = "ngram"
    max_depth: int = count(10)
    max_children: int = count(16)
    drawn_from: float = number(0.4, 0, 100, what="a temperature")
    """Least temperature of a request whose children are drawn; below it they are chosen."""

    @property
    def steered(self) -> Steered:
        return Steered(price=self.budget == "auto")

    def temperature(self, own: float, fitted: float = GREEDY_DRAFT_TEMPERATURE) -> float:
        """No fit for greedy requests: the table learns what it would bring."""
        return own if own > 0 else GREEDY_DRAFT_TEMPERATURE


class AdaptiveTree(BestFirst):
    """Fill slots in decreasing order of the learnt probability that verification accepts them.

    A slot is reached if the path above it is accepted and its earlier siblings are not, and is worth that times its own
    acceptance, all by an `AcceptanceTable` of past steps,

        v = prod_path a(t) * prod_{earlier siblings} (1 - a(s)) * a.

    A drawn child counts by what is known before its token is drawn, so its own acceptance is an expectation over the
    draft's distribution; a chosen one by its token's, since any choice is lossless for the target's own draws.
    """

    Options = AdaptiveTreeOptions
    compiled = "vllm_adaptive_tree.proposers.adaptive_tree_cpu:AdaptiveTreeCPU"
    fused = "vllm_adaptive_tree.kernels.proposers:FusedAdaptiveTree"
    kinds = ("without_replacement",)
    either = True
    by_value = True

    def __init__(self, *, max_depth: int, max_children: int, drawn_from: float):
        self.max_depth, self.max_children, self.drawn_from = max_depth, max_children, drawn_from
        self.acceptance: AcceptanceTable = AcceptanceTable()

    @classmethod
    def build(cls, options: AdaptiveTreeOptions, *, nodes: int) -> Self:
        return cls(max_depth=options.max_depth, max_children=options.max_children, drawn_from=options.drawn_from)

    @property
    def children(self) -> str:
        return f"{self.kind} children; below temperature {self.drawn_from:g} the draft's best"

    def chooses(self, temperature: float) -> bool:
        return temperature < self.drawn_from

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        return best_candidates(self.slots(growth, *self.children_of(growth, logits)), growth.nodes)

    def children_of(self, growth: Growth, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The draft's distributions [R, W, V], their children [R, W, K], and the requests with chosen ones [R] bool."""
        request = growth.request
        chosen = request.greedy if request.chosen is None else request.chosen
        q = softmax_at(logits, request.temperature[:, None])
        keys = rng_keys(growth.level, logits)
        planned, rng = torch.full_like(keys, min(self.max_children, q.shape[-1])), request.rng.fold_in(keys)
        return q, draw_children(self.kind, q, planned, self.max_children, rng, chosen), chosen

    def slots(self, growth: Growth, q: Tensor, tokens: Tensor, chosen: Tensor) -> Candidates:
        """All slots below the frontier, node by node and not yet in order; arguments as `children_of` gives them."""
        request, path, table = growth.request, growth.front.path[:, : q.shape[1]], self.acceptance
        chance = q.gather(2, tokens.clamp(min=0)).masked_fill(tokens < 0, 0.0)
        left = torch.ones_like(chance)  # of a sum without the token itself: rounding would let a value see its draw
        left[..., 1:].sub_(chance[..., :-1].cumsum(2)).clamp_(min=LEAST_LEFT)
        row = table.row(request.temperature, request.greedy, chosen, growth.level + 1)
        cell, accepted = table.look_up(row, chance / left)
        accepted = accepted.to(path.dtype)
        rejected = torch.nn.functional.pad((1 - accepted[..., :-1]).log().cumsum(2), (1, 0))
        slot = (path[:, :, None] + rejected).masked_fill(chance <= 0, -torch.inf)
        below = slot + accepted.log()
        # A value must not exceed those of the parent and of earlier siblings, or a draw could prune its own slot.
        above = growth.front.value[:, : q.shape[1], None]
        before = torch.minimum(slot + self._expected(q, tokens, left, row).log(), above).cummin(2).values
        value = torch.where(chosen[:, None, None], torch.minimum(below, above), before)
        column = torch.arange(path.shape[1], device=path.device)[None, :, None].expand_as(tokens)
        columns = (part.flatten(1) for part in (tokens, column, value, below, cell))
        tokens, column, value, below, cell = columns
        return Candidates(tokens, column, value, below, chance.shape[2], cell)

    def _expected(self, q: Tensor, tokens: Tensor, left: Tensor, row: Tensor) -> Tensor:
        """Chance that a slot's token is accepted if it is reached, before it is drawn: [R, W, K].

        The best token of q [R, W, V] has a share of what is `left` [R, W, K], unless an earlier sibling is it; the rest
        is taken to spread over a few tokens.
        """
        share, best = q.max(-1, keepdim=True)
        drawn = (tokens == best).long()
        share = (share / left).clamp(max=1.0).masked_fill(drawn.cumsum(2) > drawn, 0.0)
        _, of_best = self.acceptance.look_up(row, share)
        _, of_others = self.acceptance.look_up(row, (1 - share) / SPREAD)
        return (of_others + share * (of_best - of_others)).to(left.dtype)

    def expand(self, level: Level, worst: Tensor, gain: Tensor) -> Tensor:
        """Nodes to expand: no child is worth more than its parent, or than the parent's path."""
        bound = torch.minimum(level.path, level.value)
        return (bound > worst.clamp(min=self.floor)) & (gain > self.threshold)[:, None]

    def front(self, level: Level, expand: Tensor) -> Level:
        return packed(level, expand)
