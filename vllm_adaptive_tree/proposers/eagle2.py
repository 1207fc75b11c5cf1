"""EAGLE-2: expand the K best nodes of each level, then keep the n best overall (Li et al., arXiv 2406.16858)."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from vllm_adaptive_tree.drafters import Frontier
from vllm_adaptive_tree.options import count
from vllm_adaptive_tree.proposers.base import log_softmax_at
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, Level, best_candidates
from vllm_adaptive_tree.proposers.opt_tree import top_children
from vllm_adaptive_tree.proposers.options import UnscaledOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle2Options(UnscaledOptions):
    top_k: int = count(10)
    max_depth: int = count(6)


class Eagle2(BestFirst):
    """OPT-Tree with a beam of K instead of n, always to `max_depth`.

    The paper records all K^2 children of a level and reranks at the end. Here nodes outside the n best so far are
    dropped at once: neither they nor their descendants could survive the reranking.
    """

    Options = Eagle2Options
    fused = "vllm_adaptive_tree.kernels.proposers:FusedEagle2"
    kinds = ("one_hot",)

    def __init__(self, *, max_depth: int, top_k: int):
        self.max_depth, self.top_k = max_depth, top_k
        self.max_children = top_k

    @classmethod
    def build(cls, options: Eagle2Options, *, nodes: int) -> Self:
        return cls(max_depth=options.max_depth, top_k=options.top_k)

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        log_probs = log_softmax_at(logits, growth.request.temperature[:, None])  # [R, W, V]
        children = top_children(log_probs, growth.front.path[:, : log_probs.shape[1]], self.top_k)
        return best_candidates(children, growth.nodes)

    def expand(self, level: Level, worst: Tensor, gain: Tensor) -> Tensor:
        expand = level.path > worst
        expand[:, self.top_k :] = False  # the best come first
        return expand

    def frontier(self, growth: Growth) -> Frontier:
        tokens, parent = super().frontier(growth)
        return Frontier(tokens[:, : self.top_k], parent[:, : self.top_k])
