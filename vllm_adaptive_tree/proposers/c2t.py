"""C2T: a small classifier decides which nodes to verify (Huo et al., arXiv 2502.13652)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from vllm_adaptive_tree.options import count, file, flag, fraction, one_of
from vllm_adaptive_tree.proposers.base import log_softmax_at
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, best_candidates
from vllm_adaptive_tree.proposers.gate import FEATURES, Gate, entropy
from vllm_adaptive_tree.proposers.opt_tree import top_children
from vllm_adaptive_tree.proposers.options import UnscaledOptions, bundled, existing_file

TIE = 1e-6
"""Weight of the log path probability against the log confidence: only to break ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class C2TOptions(UnscaledOptions):
    beta: float = fraction(0.5)
    top_k: int = count(15)
    entropy_top: int = count(1000)
    max_depth: int = count(10)
    second_pruning: bool = flag(default=True)
    mode: str = one_of("tree", "tree", "chain")
    gate: str | None = file()

    def shipped(self) -> Path | None:
        return bundled("c2t.safetensors") if self.gate is None else None


class C2T(BestFirst):
    """Keep candidates with confidence C(path probability, entropy of the parent's distribution, depth) >= `beta`.

    The top K tokens of every node of a level are candidates. Those below `beta` are pruned (first pruning), then all
    but the K most confident of the level (second pruning, optional). The rest are the next level. Depth 0: children of
    the root.

    A node's value is the smallest confidence on its path. If more nodes survive than the budget allows, the most
    confident stay, ties to the more probable path. The paper has no such budget.
    """

    Options = C2TOptions
    kinds = ("one_hot",)
    gate: Gate

    def __init__(self, gate: Gate, options: C2TOptions):
        self.gate, self.beta, self.entropy_top = gate, options.beta, options.entropy_top
        self.max_depth, self.second_pruning = options.max_depth, options.second_pruning
        self.width = 1 if options.mode == "chain" else options.top_k  # candidates of a node, and survivors of a level
        self.max_children = self.width

    @classmethod
    def build(cls, options: C2TOptions, *, nodes: int) -> Self:
        return cls(Gate.load(existing_file(options.gate or options.shipped(), "gate"), inputs=3), options)

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        log_probs = log_softmax_at(logits, growth.request.temperature[:, None])  # [R, W, V]
        candidates = top_children(log_probs, growth.front.path[:, : log_probs.shape[1]], self.width)
        parent = candidates.parent_column
        parent_entropy = entropy(log_probs, self.entropy_top).gather(1, parent)  # [R, C]
        depth = torch.full_like(parent_entropy, growth.level)
        confidence = self.gate(features(candidates.path, parent_entropy, depth, self.gate.features))
        keep = (confidence >= self.beta) & (candidates.path > -torch.inf)
        if self.second_pruning:
            order = confidence.masked_fill(~keep, -1.0).argsort(dim=1, descending=True, stable=True)
            keep = keep & (order.argsort(dim=1) < self.width)
        # a step is never positive, so no child sorts before its parent
        step = candidates.path - growth.front.path.gather(1, parent)
        value = torch.minimum(
            growth.front.value.gather(1, parent) + TIE * step,
            confidence.clamp(min=torch.finfo(confidence.dtype).tiny).log() + TIE * candidates.path,
        )
        return best_candidates(candidates._replace(value=value.masked_fill(~keep, -torch.inf)), growth.nodes)


def features(path: Tensor, entropy: Tensor, depth: Tensor, kind: str) -> Tensor:
    """The gate's inputs [..., 3] for nodes [...]: path probability, entropy of the parent's distribution, depth from 0.

    Args:
        path: log path probability.
        kind: one of `FEATURES`.
    """
    return torch.stack([FEATURES[kind](path), entropy, depth.to(path.dtype)], -1)
