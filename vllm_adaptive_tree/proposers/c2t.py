"""C2T: a small classifier decides which nodes are worth verifying (Huo et al., arXiv 2502.13652)."""

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.gates.mlp import FEATURES, Gate, entropy
from vllm_adaptive_tree.proposers.base import log_law
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, ranked
from vllm_adaptive_tree.proposers.opt_tree import top_children

TIE = 1e-6
"""What a path's log probability counts for beside the log of a confidence: it only tells equals apart."""


class C2T(BestFirst):
    """Every candidate's confidence C(path probability, entropy of its parent's law, depth) must reach `beta`.

    The K best tokens of every node of a level are candidates; those below `beta` go (first pruning), then all but the K
    most confident of the level (second pruning, optional). The rest are the next level. Depth counts from 0 for the
    first drafted layer.

    A node's value is the least confidence on its path, so where more nodes survive than the budget holds, those in
    which the gate believes most stay, and of equals the more probable paths. The paper has no such budget.
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
        features: str = "paper",
    ):
        """`features`: what the gate reads, one of `FEATURES`."""
        self.gate, self.beta, self.entropy_top, self.max_depth = gate, beta, entropy_top, max_depth
        self.features = features
        self.width = 1 if chain else top_k  # candidates of a node, and survivors of a level
        self.second_pruning = second_pruning
        self.kind: Kind = "one_hot"
        self.most_children = self.width

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        law = log_law(logits, growth.request.temperature[:, None])  # [R, W, V]
        candidates = top_children(law, growth.front.path[:, : law.shape[1]], self.width)
        above = candidates.above
        own = entropy(law, self.entropy_top).gather(1, above)  # [R, C]
        depth = torch.full_like(own, growth.level)
        confidence = self.gate(features(candidates.path, own, depth, self.features))
        keep = (confidence >= self.beta) & (candidates.path > -torch.inf)
        if self.second_pruning:
            order = confidence.masked_fill(~keep, -1.0).argsort(dim=1, descending=True, stable=True)
            keep = keep & (order.argsort(dim=1) < self.width)
        step = candidates.path - growth.front.path.gather(1, above)  # never above 0: no child before its parent
        value = torch.minimum(
            growth.front.value.gather(1, above) + TIE * step,
            confidence.clamp(min=torch.finfo(confidence.dtype).tiny).log() + TIE * candidates.path,
        )
        return ranked(candidates._replace(value=value.masked_fill(~keep, -torch.inf)), growth.nodes)


def features(path: Tensor, entropy: Tensor, depth: Tensor, kind: str) -> Tensor:
    """What the gate reads of nodes [...]: path probability, entropy of the parent's law, depth from 0: [..., 3].

    Args:
        path: log path probability.
        kind: one of `FEATURES`.
    """
    return torch.stack([FEATURES[kind](path), entropy, depth.to(path.dtype)], -1)
