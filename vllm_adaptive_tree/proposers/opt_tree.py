"""OPT-Tree: the draft tree with the largest expected acceptance (Wang et al., arXiv 2406.17276, Algorithm 1)."""

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.options import count, number
from vllm_adaptive_tree.proposers.base import log_softmax_at
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, Level
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE, MethodOptions, Steered, draft_temperature
from vllm_adaptive_tree.vocab_ops import joint_topk

THRESHOLD = 0.5
"""Threshold unless the user or the budget sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptTreeOptions(MethodOptions):
    max_depth: int = count(10)
    threshold: float | Literal["auto"] | None = number(None, 0, 1, "auto", None, what="tokens gained per level")
    """Stop when a level adds no more than this to E(A), in tokens; "auto": time of a draft level over a target forward;
    None: set by the price with `budget` "auto", else 0.5."""
    draft_temperature: float | Literal["auto"] = draft_temperature("auto", "auto")
    """Temperature of the draft distribution that shapes the tree; "auto": for greedy requests fitted if `budget` is
    "auto", else 0.6; for sampled requests their own."""

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
    """Takes per level the n most probable paths; stop when E(A) gains no more than `threshold`; keep the n best
    overall.

    E(A), the expected acceptance length, is the sum of the path probabilities of the nodes (eq. 4, without the
    root's 1). Its gain per level never increases, so stopping at the first small gain is optimal.
    """

    Options = OptTreeOptions
    compiled = "vllm_adaptive_tree.proposers.opt_tree_cpu:OptTreeCPU"
    fused = "vllm_adaptive_tree.kernels.proposers:FusedOptTree"
    kinds = ("one_hot",)
    by_value = True

    def __init__(self, *, max_depth: int, threshold: float):
        """`floor` is a log path probability: a budget would prune all children of a node below it."""
        self.max_depth = max_depth
        self.threshold = threshold
        self.max_children = 1 << 30  # as many as the budget allows

    @classmethod
    def build(cls, options: OptTreeOptions, *, nodes: int) -> Self:
        threshold = THRESHOLD if options.threshold is None else options.threshold
        steered = options.steered  # until the engine sets it, every level is drafted
        later = threshold == "auto" or steered.price
        return cls(max_depth=options.max_depth, threshold=0.0 if later else float(threshold))

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        """The n best paths that extend the frontier by one token; no other could enter the n best."""
        log_probs = log_softmax_at(logits, growth.request.temperature[:, None])  # [R, W, V]
        value, column, token = joint_topk(log_probs, growth.front.path[:, : log_probs.shape[1]], growth.nodes)
        return Candidates(token, column, value, value, min(growth.nodes, log_probs.shape[-1]))

    def expand(self, level: Level, worst: Tensor, gain: Tensor) -> Tensor:
        return (level.path > worst.clamp(min=self.floor)) & (gain > self.threshold)[:, None]


def top_children(log_probs: Tensor, path: Tensor, limit: int) -> Candidates:
    """The top `limit` tokens of each node, from `log_probs` [R, W, V]; their value is the log path probability.

    `path`: [R, W] log path probabilities of the nodes.
    """
    value, _, token = joint_topk(log_probs[:, :, None], torch.zeros_like(log_probs[:, :, :1]), limit)  # [R, W, k]
    value = (value + path[:, :, None]).flatten(1)
    column = torch.arange(path.shape[1], device=path.device)[None, :, None].expand_as(token)
    return Candidates(token.flatten(1), column.flatten(1), value, value, token.shape[-1])
