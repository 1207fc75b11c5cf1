"""The method `new_method`: trees of each node's most probable tokens."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from vllm_adaptive_tree import BestFirst, Candidates, Growth, best_candidates, log_softmax_at
from vllm_adaptive_tree.options import count
from vllm_adaptive_tree.proposers import MethodOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMethodOptions(MethodOptions):
    """What users may write into `tree`, beside the options of all methods."""

    max_depth: int = count(6)
    width: int = count(4)


class NewMethod(BestFirst):
    """Keeps the most probable nodes; children of a node are the draft's `width` best tokens."""

    Options = NewMethodOptions
    kinds = ("one_hot",)

    def __init__(self, *, max_depth: int, width: int):
        self.max_depth, self.max_children = max_depth, width

    @classmethod
    def build(cls, options: NewMethodOptions, *, nodes: int) -> Self:
        return cls(max_depth=options.max_depth, width=options.width)

    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        log_probs = log_softmax_at(logits, growth.request.temperature[:, None])  # [R, W, V]
        columns, vocabulary = log_probs.shape[1:]
        best = log_probs.topk(min(self.max_children, vocabulary))  # [R, W, k]
        path = growth.front.path[:, :columns, None] + best.values
        value = path  # yours; it must not increase from a node to its child
        parent = torch.arange(columns, device=logits.device)[:, None].expand_as(path)
        tokens, parent, value, path = (part.flatten(1) for part in (best.indices, parent, value, path))
        return best_candidates(Candidates(tokens, parent, value, path, self.max_children), growth.nodes)
