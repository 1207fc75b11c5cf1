"""C2T: a small classifier decides which nodes are worth verifying (Huo et al., arXiv 2502.13652)."""

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.gates.mlp import Gate, entropy
from vllm_adaptive_tree.proposers import best_first
from vllm_adaptive_tree.proposers.base import Frontier, Proposal, Request, Rows, log_law
from vllm_adaptive_tree.proposers.best_first import Candidates, Growth
from vllm_adaptive_tree.proposers.opt_tree import top_children


class C2T:
    """Every candidate's confidence C(path probability, entropy of its parent's law, depth) must reach `beta`.

    The K best tokens of every node of a level are candidates; those below `beta` go (first pruning), then all but the K
    most confident of the level (second pruning, optional). The rest are the next level. Depth counts from 0 for the
    first drafted layer. Where more nodes survive than the budget holds, the most probable paths stay.
    """

    kinds: tuple[Kind, ...] = ("one_hot",)

    def __init__(
        self,
        gate: Gate,
        *,
        beta: float,
        top_k: int,
        entropy_top: int,
        max_depth: int,
        second_pruning: bool,
        chain: bool,
    ):
        self.gate, self.beta, self.entropy_top, self.max_depth = gate, beta, entropy_top, max_depth
        self.width = 1 if chain else top_k  # candidates of a node, and survivors of a level
        self.second_pruning = second_pruning
        self.kind: Kind = "one_hot"
        self.most_children = self.width

    def begin(self, rows: Rows, *, nodes: int, request: Request) -> Growth:
        law = log_law(rows.logits, request.temperature[:, None])  # [R, 1, V]
        root = torch.zeros_like(law[:, :, 0])
        return best_first.begin(self._gated(law, root, 0), nodes=nodes, request=request)

    def growing(self, growth: Growth) -> Tensor:
        return best_first.expandable(growth).any(1) & (growth.level < self.max_depth)

    def frontier(self, growth: Growth) -> Frontier:
        return best_first.frontier(growth, best_first.expandable(growth))

    def extend(self, growth: Growth, rows: Rows) -> Growth:
        expand = best_first.expandable(growth)
        law = log_law(rows.logits, growth.request.temperature[:, None])  # [R, W, V]
        path = best_first.paths_above(growth, expand, rows.logits.shape[1])
        return best_first.extend(growth, self._gated(law, path, growth.level), expand=expand)

    def finish(self, growth: Growth) -> Proposal:
        return best_first.finish(growth)

    def _gated(self, law: Tensor, path: Tensor, depth: int) -> Candidates:
        candidates = top_children(law, path, self.width)
        own = entropy(law, self.entropy_top).gather(1, candidates.above)  # [R, C]
        confidence = self.gate(features(candidates.path, own, torch.full_like(own, depth)))
        confidence = confidence.masked_fill(candidates.path == -torch.inf, -1.0)
        keep = confidence >= self.beta
        if self.second_pruning:
            order = confidence.argsort(dim=1, descending=True, stable=True)
            keep = keep & (order.argsort(dim=1) < self.width)
        return candidates._replace(value=candidates.value.masked_fill(~keep, -torch.inf))


def features(path: Tensor, entropy: Tensor, depth: Tensor) -> Tensor:
    """What the gate reads of nodes [...]: log path probability, entropy of the parent's law, depth from 0: [..., 3]."""
    return torch.stack([path.exp(), entropy, depth.to(path.dtype)], -1)
