"""Drafts that say all levels in one forward; growing a level of them runs no model.

By depth alone, the laws are independent of one another: Medusa (arXiv 2401.10774), DFlash, P-EAGLE. With a law behind
every parent token they are not: DSpark adds a bias by the token, DFlash2 scores pairs of candidates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters.base import Rows


class Depths(NamedTuple):
    logits: Tensor  # [R, K, V]: what the forward said of depths 1 to K
    depth: Tensor  # [R, S] of every slot given to the drafter so far, the root's 0 first


class OneForward(ABC):
    def begin(self, logits: Tensor) -> tuple[Rows, Depths]:
        """From the forward's rows [R, K, V] to the roots' rows (W = 1) and the state of R trees."""
        depth = torch.zeros_like(logits[:, :1, 0], dtype=torch.int64)
        return Rows(logits[:, :1].clone()), Depths(logits, depth)

    def grow(self, tokens: Tensor, parent: Tensor, state: Depths) -> tuple[Rows, Depths]:
        depth = state.depth.gather(1, parent) + 1  # of these nodes; their children's laws are those of the next one
        last = state.logits.shape[1]
        at = depth.clamp(max=last - 1)[:, :, None].expand(-1, -1, state.logits.shape[2])
        rows = Rows(self.behind(tokens.clamp(min=0), state.logits.gather(1, at)), dead=depth >= last)
        return rows, state._replace(depth=torch.cat([state.depth, depth], 1))

    @abstractmethod
    def behind(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """The logits [R, W, V] behind these `tokens` [R, W], from those of their children's depth [R, W, V]."""


class ByDepth(OneForward):
    """One law for all nodes of a depth."""

    def behind(self, tokens: Tensor, logits: Tensor) -> Tensor:
        return logits


class ByParent(OneForward):
    """A law for every parent token: the depth's logits and a bias."""

    def __init__(self, bias: Callable[[Tensor], Tensor]):
        """`bias`: tokens [R, W] -> [R, W, V]."""
        self.bias = bias

    def behind(self, tokens: Tensor, logits: Tensor) -> Tensor:
        return logits + self.bias(tokens)
