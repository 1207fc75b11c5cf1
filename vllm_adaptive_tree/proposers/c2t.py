"""C2T: a small classifier decides which nodes are worth verifying (Huo et al., arXiv 2502.13652)."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.proposers.base import log_law
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, ranked
from vllm_adaptive_tree.proposers.gate import FEATURES, Gate, entropy
from vllm_adaptive_tree.proposers.opt_tree import top_children
from vllm_adaptive_tree.proposers.options import (
    GREEDY_DRAFT_TEMPERATURE,
    MethodOptions,
    bundled,
    count,
    file,
    flag,
    one_of,
    readable,
    share,
)

TIE = 1e-6
"""What a path's log probability counts for beside the log of a confidence: it only tells equals apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class C2TOptions(MethodOptions):
    beta: float = share(0.5)
    top_k: int = count(15)
    entropy_top: int = count(1000)
    max_depth: int = count(10)
    second_pruning: bool = flag(default=True)
    mode: str = one_of("tree", "tree", "chain")
    gate: str | None = file()

    def temperature(self, own: float, fitted: float = GREEDY_DRAFT_TEMPERATURE) -> float:
        """Deterministic trees are shaped by the law itself."""
        return 1.0

    def shipped(self) -> Path | None:
        return bundled("c2t.safetensors") if self.gate is None else None


class C2T(BestFirst):
    """Every candidate's confidence C(path probability, entropy of its parent's law, depth) must reach `beta`.

    The K best tokens of every node of a level are candidates; those below `beta` go (first pruning), then all but the K
    most confident of the level (second pruning, optional). The rest are the next level. Depth counts from 0 for the
    first drafted layer.

    A node's value is the least confidence on its path, so where more nodes survive than the budget holds, those in
    which the gate believes most stay, and of equals the more probable paths. The paper has no such budget.
    """

    Options: ClassVar[type[MethodOptions]] = C2TOptions
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

    @classmethod
    def build(cls, options: C2TOptions, *, nodes: int) -> Self:
        gate = Gate.load(readable(options.gate or options.shipped(), "gate"), inputs=3)
        return cls(
            gate,
            beta=options.beta,
            top_k=options.top_k,
            entropy_top=options.entropy_top,
            max_depth=options.max_depth,
            second_pruning=options.second_pruning,
            chain=options.mode == "chain",
            features=gate.features,
        )

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
