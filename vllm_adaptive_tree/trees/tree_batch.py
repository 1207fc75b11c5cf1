"""Draft trees of a batch, as tensors."""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

EMPTY = -1  # token of a slot that holds no node
EMPTY_SLOT = (EMPTY, -1, 0, -math.inf)
"""Token, parent, depth and log weight of an empty slot."""


class TreeBatch(NamedTuple):
    """R draft trees of at most N nodes each, without roots, in generation order (parents before children).

    Empty slots, after a tree's last node, hold `EMPTY_SLOT`.
    """

    tokens: Tensor  # [R, N] int64
    parent: Tensor  # [R, N] int64, -1: the root
    depth: Tensor  # [R, N] int64, 1 for children of the root
    log_weight: Tensor
    """[R, N] float32: log of the value the node was chosen by: path probability, slot value, or confidence."""

    @classmethod
    def empty(cls, requests: int, nodes: int, device: torch.device) -> Self:
        """R trees without a node, in N slots."""
        return cls(*(torch.full((requests, nodes), fill, device=device) for fill in EMPTY_SLOT))

    @property
    def valid(self) -> Tensor:
        return self.tokens != EMPTY  # [R, N]

    def cut(self, limit: Tensor) -> "TreeBatch":
        """Keep the first `limit[r]` nodes of every tree ([R]); in generation order every prefix is a tree."""
        removed = torch.arange(self.tokens.shape[1], device=limit.device) >= limit[:, None]
        return TreeBatch(*(column.masked_fill(removed, fill) for column, fill in zip(self, EMPTY_SLOT, strict=True)))

    def padded(self, nodes: int) -> "TreeBatch":
        """The same trees in N = `nodes` slots, no fewer than now."""
        more = (0, nodes - self.tokens.shape[1])
        return TreeBatch(*(pad(column, more, value=fill) for column, fill in zip(self, EMPTY_SLOT, strict=True)))

    def child(self, node: Tensor, token: Tensor) -> Tensor:
        """The child of `node` [R] (-1: the root) with token `token` [R], or -1 if there is none: [R]."""
        match = (self.parent == node[:, None]) & (self.tokens == token[:, None]) & self.valid
        return torch.where(match.any(1), match.int().argmax(1), -1)

    def children(self, node: Tensor, limit: int) -> Tensor:
        """Tokens of the first `limit` children of `node` [R] (-1: the root), generation order: [R, limit], -1 pads."""
        match = (self.parent == node[:, None]) & self.valid
        order = match.int().sort(dim=1, descending=True, stable=True)
        tokens = self.tokens.gather(1, order.indices).masked_fill(order.values == 0, EMPTY)[:, :limit]
        return pad(tokens, (0, limit - tokens.shape[1]), value=EMPTY)

    def nth_child(self, node: Tensor, n: Tensor) -> Tensor:
        """The n-th child ([R], from 0) of `node` [R], or -1 if there are fewer: [R]."""
        match = (self.parent == node[:, None]) & self.valid
        hit = match & (match.cumsum(1) == n[:, None] + 1)
        return torch.where(hit.any(1), hit.int().argmax(1), -1)
