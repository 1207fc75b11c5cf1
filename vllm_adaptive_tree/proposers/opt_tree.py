"""OPT-Tree: the draft tree with the largest expected acceptance (Wang et al., arXiv 2406.17276, Algorithm 1)."""

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.proposers import best_first
from vllm_adaptive_tree.proposers.base import Frontier, Proposal, Request, Rows, log_law
from vllm_adaptive_tree.proposers.best_first import Candidates, Growth
from vllm_adaptive_tree.rows import largest


class OptTree:
    """Per level the n most probable paths; stop when E(A) gains no more than `threshold`; keep the n best of all.

    E(A), the expected acceptance length, is the sum of the path probabilities of the nodes (eq. 4; the root's 1 is
    left out). Its growth per level never increases, so the first stop is the best one.
    """

    kinds: tuple[Kind, ...] = ("one_hot",)

    def __init__(self, *, max_depth: int, threshold: float):
        self.max_depth = max_depth
        self.threshold = threshold
        self.kind: Kind = "one_hot"
        self.most_children = 1 << 30  # as many as the budget allows

    def begin(self, rows: Rows, *, nodes: int, request: Request) -> Growth:
        law = log_law(rows.logits, request.temperature[:, None])  # [R, 1, V]
        root = torch.zeros_like(law[:, :, 0])
        return best_first.begin(self._candidates(law, root, nodes), nodes=nodes, request=request)

    def growing(self, growth: Growth) -> Tensor:
        return (growth.gain > self.threshold) & (growth.level < self.max_depth)

    def frontier(self, growth: Growth) -> Frontier:
        return best_first.frontier(growth, self._expand(growth))

    def extend(self, growth: Growth, rows: Rows) -> Growth:
        expand = self._expand(growth)
        law = log_law(rows.logits, growth.request.temperature[:, None])  # [R, W, V]
        path = best_first.paths_above(growth, expand, rows.logits.shape[1])
        candidates = self._candidates(law, path, growth.best.tokens.shape[1])
        return best_first.extend(growth, candidates, expand=expand)

    def _candidates(self, law: Tensor, path: Tensor, nodes: int) -> Candidates:
        """The n best paths that go on from log `path` [R, W] by one token; no other could enter the n best."""
        value, column, token = largest(law, path, nodes)
        drawn = torch.full_like(column[:, :1], min(nodes, law.shape[-1])).expand(path.shape)
        return Candidates(token, column, value, value, drawn)

    def _expand(self, growth: Growth) -> Tensor:
        return best_first.expandable(growth) & self.growing(growth)[:, None]

    def finish(self, growth: Growth) -> Proposal:
        return best_first.finish(growth)


def top_children(law: Tensor, path: Tensor, most: int) -> Candidates:
    """The `most` best tokens of each log law [R, W, V], their value the path probability below log `path` [R, W]."""
    value, _, token = largest(law[:, :, None], torch.zeros_like(law[:, :, :1]), most)  # [R, W, k]
    value = (value + path[:, :, None]).flatten(1)
    column = torch.arange(path.shape[1], device=path.device)[None, :, None].expand_as(token)
    drawn = torch.full_like(token[:, :, 0], token.shape[-1])
    return Candidates(token.flatten(1), column.flatten(1), value, value, drawn)
