"""EAGLE-2: expand the K best nodes of each level, then keep the n best of all (Li et al., arXiv 2406.16858)."""

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.proposers import best_first
from vllm_adaptive_tree.proposers.base import Frontier, Proposal, Request, Rows, log_law
from vllm_adaptive_tree.proposers.best_first import Growth
from vllm_adaptive_tree.proposers.opt_tree import top_children


class Eagle2:
    """OPT-Tree with a beam of K instead of n, and no stop before `max_depth`.

    The paper records all K^2 children of a level and reranks at the end. Nodes that are not among the n best so far
    are dropped here at once: neither they nor their descendants could survive the reranking.
    """

    kinds: tuple[Kind, ...] = ("one_hot",)

    def __init__(self, *, max_depth: int, top_k: int):
        self.max_depth, self.top_k = max_depth, top_k
        self.kind: Kind = "one_hot"
        self.most_children = top_k

    def begin(self, rows: Rows, *, nodes: int, request: Request) -> Growth:
        law = log_law(rows.logits, request.temperature[:, None])  # [R, 1, V]
        root = torch.zeros_like(law[:, :, 0])
        return best_first.begin(top_children(law, root, self.top_k), nodes=nodes, request=request)

    def growing(self, growth: Growth) -> Tensor:
        return best_first.expandable(growth).any(1) & (growth.level < self.max_depth)

    def frontier(self, growth: Growth) -> Frontier:
        tokens, parent = best_first.frontier(growth, best_first.expandable(growth))
        return Frontier(tokens[:, : self.top_k], parent[:, : self.top_k])  # the best stand in front

    def extend(self, growth: Growth, rows: Rows) -> Growth:
        expand = best_first.expandable(growth)
        law = log_law(rows.logits, growth.request.temperature[:, None])  # [R, W, V]
        path = best_first.paths_above(growth, expand, rows.logits.shape[1])
        return best_first.extend(growth, top_children(law, path, self.top_k), expand=expand)

    def finish(self, growth: Growth) -> Proposal:
        return best_first.finish(growth)
