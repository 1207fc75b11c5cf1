"""DyMax of C2T's Table 3: a chain that ends before a token of which the draft is not sure."""

import math
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from vllm_adaptive_tree import register
from vllm_adaptive_tree.options import count, fraction
from vllm_adaptive_tree.proposers.base import log_softmax_at
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, best_candidates
from vllm_adaptive_tree.proposers.opt_tree import top_children
from vllm_adaptive_tree.proposers.options import UnscaledOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DyMaxOptions(UnscaledOptions):
    least: float = fraction(0.3)
    max_depth: int = count(10)


class DyMax(BestFirst):
    """No gate file: a gate reads path probabilities, this the probability of a token alone."""

    Options = DyMaxOptions
    kinds = ("one_hot",)
    max_children = 1

    def __init__(self, options: DyMaxOptions):
        self.max_depth, self.least = options.max_depth, math.log(options.least)

    @classmethod
    def build(cls, options: DyMaxOptions, *, nodes: int) -> Self:
        return cls(options)

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        log_probs = log_softmax_at(logits, growth.request.temperature[:, None])  # [R, 1, V]
        found = top_children(log_probs, growth.front.path[:, : log_probs.shape[1]], 1)
        unsure = found.path - growth.front.path.gather(1, found.parent_column) < self.least
        return best_candidates(found._replace(value=found.value.masked_fill(unsure, -math.inf)), growth.nodes)


register("dymax", DyMax)
