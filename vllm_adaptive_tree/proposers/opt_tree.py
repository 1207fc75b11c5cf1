"""OPT-Tree: the draft tree with the largest expected acceptance (Wang et al., arXiv 2406.17276, Algorithm 1)."""

import math

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.proposers.base import log_law
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, Level
from vllm_adaptive_tree.rows import largest


class OptTree(BestFirst):
    """Per level the n most probable paths; stop when E(A) gains no more than `threshold`; keep the n best of all.

    E(A), the expected acceptance length, is the sum of the path probabilities of the nodes (eq. 4; the root's 1 is
    left out). Its growth per level never increases, so the first stop is the best one.
    """

    kinds: tuple[Kind, ...] = ("one_hot",)

    def __init__(self, *, max_depth: int, threshold: float):
        self.max_depth = max_depth
        self.threshold = threshold
        self.floor = -math.inf
        """Log path probability up to which no node is expanded: a budget would not keep what comes of it."""
        self.kind: Kind = "one_hot"
        self.most_children = 1 << 30  # as many as the budget allows

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        """The n best paths that go on from the frontier by one token; no other could enter the n best."""
        law = log_law(logits, growth.request.temperature[:, None])  # [R, W, V]
        value, column, token = largest(law, growth.front.path[:, : law.shape[1]], growth.nodes)
        return Candidates(token, column, value, value, min(growth.nodes, law.shape[-1]))

    def expand(self, level: Level, worst: Tensor, gain: Tensor) -> Tensor:
        return (level.path > worst.clamp(min=self.floor)) & (gain > self.threshold)[:, None]


def top_children(law: Tensor, path: Tensor, most: int) -> Candidates:
    """The `most` best tokens of each log law [R, W, V], node by node, their value the path probability below log `path`
    [R, W]."""
    value, _, token = largest(law[:, :, None], torch.zeros_like(law[:, :, :1]), most)  # [R, W, k]
    value = (value + path[:, :, None]).flatten(1)
    column = torch.arange(path.shape[1], device=path.device)[None, :, None].expand_as(token)
    return Candidates(token.flatten(1), column.flatten(1), value, value, token.shape[-1])
