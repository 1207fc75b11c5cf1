"""Drafts that predict all levels in one forward; growing a level runs no model.

By depth alone, the predictions of different depths are independent: Medusa (arXiv 2401.10774), DFlash, P-EAGLE.
Conditioned on the parent token they are not: DSpark adds a bias per token, DFlash2 scores pairs of candidates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters.base import Rows


class DepthState(NamedTuple):
    logits: Tensor  # [R, K, V]: the prediction for depths 1 to K
    depth: Tensor  # [R, S] of every slot so far, the root (0) first


class OneForward(ABC):
    """The drafter interface over precomputed logits."""

    def begin(self, logits: Tensor) -> tuple[Rows, DepthState]:
        """From the forward's logits [R, K, V]: the roots' rows (W = 1), and the state of R trees."""
        depth = torch.zeros_like(logits[:, :1, 0], dtype=torch.int64)
        return Rows(logits[:, :1].clone()), DepthState(logits, depth)

    def grow(self, tokens: Tensor, parent: Tensor, state: DepthState) -> tuple[Rows, DepthState]:
        depth = state.depth.gather(1, parent) + 1  # of these nodes; their children are one deeper
        last = state.logits.shape[1]
        at = depth.clamp(max=last - 1)[:, :, None].expand(-1, -1, state.logits.shape[2])
        rows = Rows(self.child_logits(tokens.clamp(min=0), state.logits.gather(1, at)), dead=depth >= last)
        return rows, state._replace(depth=torch.cat([state.depth, depth], 1))

    @abstractmethod
    def child_logits(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Logits [R, W, V] of the children of nodes with these `tokens` [R, W], from the `logits` of their depth."""


class ByDepth(OneForward):
    """The same distribution for all nodes of a depth."""

    def child_logits(self, tokens: Tensor, logits: Tensor) -> Tensor:
        return logits


class ByParent(OneForward):
    """A distribution for each parent token: the depth's logits plus a bias."""

    def __init__(self, bias: Callable[[Tensor], Tensor]):
        """`bias`: tokens [R, W] -> [R, W, V]."""
        self.bias = bias

    def child_logits(self, tokens: Tensor, logits: Tensor) -> Tensor:
        return logits + self.bias(tokens)
