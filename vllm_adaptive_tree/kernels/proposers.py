"""Proposers that grow their trees by kernels."""

from typing import Any, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.kernels.children import draw_children
from vllm_adaptive_tree.kernels.growth import MOST_CANDIDATES, Limits, kept, scalar, slots_read
from vllm_adaptive_tree.kernels.sampling import FusedRNG, put_top
from vllm_adaptive_tree.kernels.shape import place_children
from vllm_adaptive_tree.kernels.slots import MOST_CHILDREN, draft_slots, slot_values
from vllm_adaptive_tree.proposers.adaptive_tree import AdaptiveTree
from vllm_adaptive_tree.proposers.base import log_softmax_at, rng_keys, softmax_at
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, best_candidates
from vllm_adaptive_tree.proposers.dyspec import DySpec
from vllm_adaptive_tree.proposers.eagle2 import Eagle2
from vllm_adaptive_tree.proposers.mcsd import Mcsd
from vllm_adaptive_tree.proposers.opt_tree import OptTree, top_children
from vllm_adaptive_tree.proposers.sequoia import Sequoia
from vllm_adaptive_tree.proposers.static_tree import ShapeGrowth, StaticTree


class FusedGrowth(BestFirst):
    """Takes candidates in any order, and expands nodes as OPT-Tree does."""

    @property
    def limits(self) -> Limits | None:
        """What `kept` compares with besides the n-th best value."""
        return self.threshold, self.floor

    def with_level(self, growth: Growth, candidates: Candidates, width: int) -> Growth:
        value = candidates.value
        if value.dtype != torch.float32 or max(value.shape[1], growth.nodes) > MOST_CANDIDATES:
            return super().with_level(growth, best_candidates(candidates, growth.nodes), width)
        return kept(growth, candidates, width=width, limits=self.limits)

    def slots_read(self, growth: Growth, dead: Tensor) -> Tensor:
        return slots_read(growth, dead)


class FusedOptTree(FusedGrowth, OptTree):
    @classmethod
    def of(cls, proposer: OptTree) -> Self:
        return cls(max_depth=proposer.max_depth, threshold=proposer.threshold)


class FusedAdaptiveTree(FusedGrowth, AdaptiveTree):
    @classmethod
    def of(cls, proposer: AdaptiveTree) -> Self:
        made = cls(max_depth=proposer.max_depth, max_children=proposer.max_children, drawn_from=proposer.drawn_from)
        made.acceptance = proposer.acceptance
        return made

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        request, children = growth.request, min(self.max_children, logits.shape[-1])
        if logits.dtype == torch.float64 or children > MOST_CHILDREN or not isinstance(request.rng, FusedRNG):
            return self.slots(growth, *self.children_of(growth, logits))
        chosen = request.greedy if request.chosen is None else request.chosen
        q = softmax_at(logits, request.temperature[:, None])
        rng = request.rng.fold_in(rng_keys(growth.level, logits))
        tokens = rng.sample_without_replacement(q, children)
        best = put_top(tokens, q, chosen)
        return slot_values(tokens, q, best, growth, chosen, self.acceptance)


class FusedDySpec(FusedGrowth, DySpec):
    limits = None
    """Its threshold is one of slots: their paths end at it."""

    @classmethod
    def of(cls, proposer: DySpec) -> Self:
        return cls(max_depth=proposer.max_depth, max_children=proposer.max_children, threshold=proposer.threshold)

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        request, children = growth.request, min(self.max_children, logits.shape[-1])
        if logits.dtype == torch.float64 or children > MOST_CHILDREN:
            return super().candidates(growth, logits)
        q = softmax_at(logits, request.temperature[:, None])
        rng = request.rng.fold_in(rng_keys(growth.level, logits))
        tokens = rng.sample_without_replacement(q, children)
        return draft_slots(tokens, q, growth, scalar(self._min_value, q.device))


class FusedEagle2(FusedGrowth, Eagle2):
    limits = None
    """The frontier is its beam."""

    @classmethod
    def of(cls, proposer: Eagle2) -> Self:
        return cls(max_depth=proposer.max_depth, top_k=proposer.top_k)

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        log_probs = log_softmax_at(logits, growth.request.temperature[:, None])
        return top_children(log_probs, growth.front.path[:, : log_probs.shape[1]], self.top_k)


class FusedStaticTree(StaticTree):
    """Draws the children of a level and puts them into their trees."""

    @classmethod
    def of(cls, proposer: StaticTree) -> Self:
        made: Any = cls.__new__(cls)
        vars(made).update(vars(proposer))
        return made

    def extend(self, growth: ShapeGrowth, rows: Rows) -> ShapeGrowth:
        request, logits, level = growth.request, rows.logits, growth.plan.levels[growth.level]
        rng, dead = request.rng.fold_in(rng_keys(growth.level, logits)), rows.dead
        if logits.dtype == torch.float64 or request.initial is not None or not isinstance(rng, FusedRNG):
            return super().extend(growth, rows)
        assert dead is not None
        q = softmax_at(logits, request.temperature[:, None])
        planned = level.fanout[: logits.shape[1]].expand(logits.shape[:2])
        drawn = draw_children(self.kind, q, planned, level.max_fanout, rng, request.greedy)
        grown, exists = place_children(growth, drawn, q, dead)
        return grown._replace(going=growth.going & self.goes_on(q, rows.hidden, exists))


class FusedSequoia(FusedStaticTree, Sequoia):
    pass


class FusedMcsd(FusedStaticTree, Mcsd):
    pass
