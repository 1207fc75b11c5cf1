"""OPT-Tree: the draft tree with the largest expected acceptance (Wang et al., arXiv 2406.17276, Algorithm 1)."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.proposers.base import log_law
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, Level
from vllm_adaptive_tree.proposers.options import (
    GREEDY_DRAFT_TEMPERATURE,
    MethodOptions,
    Steered,
    count,
    is_number,
    option,
    threshold,
)
from vllm_adaptive_tree.vocab_ops import joint_topk

THRESHOLD = 0.5
"""Where neither the user nor the budget says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptTreeOptions(MethodOptions):
    max_depth: int = count(10)
    threshold: float | Literal["auto"] | None = threshold(None, "tokens gained per level", none=True)
    """Stop when a level adds no more than this to E(A), in tokens; "auto": draft level over target forward; None: what
    pays under `budget` "auto", else 0.5."""
    draft_temperature: float | Literal["auto"] = option(
        "auto", lambda value: value == "auto" or (is_number(value) and value > 0), "a number above 0 or 'auto'"
    )
    """Temperature of the law that shapes the tree; "auto": for greedy requests fitted under `budget` "auto" and
    else 0.6; for others their own."""

    @property
    def steered(self) -> Steered:
        auto = self.budget == "auto"
        return Steered(
            measured=self.threshold == "auto",
            price=self.threshold is None and auto,
            temperature=self.draft_temperature == "auto" and auto,
        )

    def temperature(self, own: float, fitted: float = GREEDY_DRAFT_TEMPERATURE) -> float:
        if self.draft_temperature != "auto":
            return float(self.draft_temperature)
        return own if own > 0 else fitted


class OptTree(BestFirst):
    """Per level the n most probable paths; stop when E(A) gains no more than `threshold`; keep the n best of all.

    E(A), the expected acceptance length, is the sum of the path probabilities of the nodes (eq. 4; the root's 1 is
    left out). Its growth per level never increases, so the first stop is the best one.
    """

    Options: ClassVar[type[MethodOptions]] = OptTreeOptions
    compiled: ClassVar[str | None] = "vllm_adaptive_tree.proposers.on_host:OptTreeOnHost"
    kinds: tuple[Kind, ...] = ("one_hot",)

    def __init__(self, *, max_depth: int, threshold: float):
        """`floor` is a log path probability: a budget would not keep what comes of a node that is worth less."""
        self.max_depth = max_depth
        self.threshold = threshold
        self.kind: Kind = "one_hot"
        self.most_children = 1 << 30  # as many as the budget allows

    @classmethod
    def build(cls, options: OptTreeOptions, *, nodes: int) -> Self:
        threshold = THRESHOLD if options.threshold is None else options.threshold
        steered = options.steered  # until the engine has set it, every level pays
        later = threshold == "auto" or steered.price
        return cls(max_depth=options.max_depth, threshold=0.0 if later else float(threshold))

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        """The n best paths that go on from the frontier by one token; no other could enter the n best."""
        law = log_law(logits, growth.request.temperature[:, None])  # [R, W, V]
        value, column, token = joint_topk(law, growth.front.path[:, : law.shape[1]], growth.nodes)
        return Candidates(token, column, value, value, min(growth.nodes, law.shape[-1]))

    def expand(self, level: Level, worst: Tensor, gain: Tensor) -> Tensor:
        return (level.path > worst.clamp(min=self.floor)) & (gain > self.threshold)[:, None]


def top_children(law: Tensor, path: Tensor, most: int) -> Candidates:
    """The `most` best tokens of each log law [R, W, V], node by node, their value the path probability below log `path`
    [R, W]."""
    value, _, token = joint_topk(law[:, :, None], torch.zeros_like(law[:, :, :1]), most)  # [R, W, k]
    value = (value + path[:, :, None]).flatten(1)
    column = torch.arange(path.shape[1], device=path.device)[None, :, None].expand_as(token)
    return Candidates(token.flatten(1), column.flatten(1), value, value, token.shape[-1])
