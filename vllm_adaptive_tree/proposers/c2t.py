"""C2T: a small classifier decides which nodes are worth verifying (Huo et al., arXiv 2502.13652)."""

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.gates.mlp import Gate, entropy
from vllm_adaptive_tree.proposers.base import log_law
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, ranked
from vllm_adaptive_tree.proposers.opt_tree import top_children


class C2T(BestFirst):
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

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        law = log_law(logits, growth.request.temperature[:, None])  # [R, W, V]
        candidates = top_children(law, growth.front.path[:, : law.shape[1]], self.width)
        own = entropy(law, self.entropy_top).gather(1, candidates.above)  # [R, C]
        confidence = self.gate(features(candidates.path, own, torch.full_like(own, growth.level)))
        confidence = confidence.masked_fill(candidates.path == -torch.inf, -1.0)
        keep = confidence >= self.beta
        if self.second_pruning:
            order = confidence.argsort(dim=1, descending=True, stable=True)
            keep = keep & (order.argsort(dim=1) < self.width)
        value = candidates.value.masked_fill(~keep, -torch.inf)
        return ranked(candidates._replace(value=value, path=value), growth.nodes)


def features(path: Tensor, entropy: Tensor, depth: Tensor) -> Tensor:
    """What the gate reads of nodes [...]: log path probability, entropy of the parent's law, depth from 0: [..., 3]."""
    return torch.stack([path.exp(), entropy, depth.to(path.dtype)], -1)
