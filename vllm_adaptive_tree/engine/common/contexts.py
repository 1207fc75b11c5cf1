"""The contexts that the levels of a drafted tree attend to."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

ROOM = 32
"""Columns for the nodes of a tree, before its context."""


def finite(keys: Tensor) -> Tensor:
    """Keys or values, 0 where they are not finite: masked entries must be numbers, since 0 times NaN is NaN."""
    return torch.nan_to_num(keys, nan=0.0, posinf=0.0, neginf=0.0)


class Contexts(Protocol):
    """The contexts of R trees in one step."""

    room: int
    """Columns for nodes, before the context."""
    width: int
    """Columns of the context: those of the longest one, or more."""
    stay: bool
    """False if a layer is opened again at every level, since all layers together take too much memory."""

    def open(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value [R, Hkv, room + width, D] float32 of a layer; the room holds finite numbers."""


class PagedContexts:
    """Contexts that are copied out of the paged cache in each step, or at each level."""

    room = ROOM

    def __init__(self, block_table: Tensor, block_size: int, *, stay: bool = True):
        """`block_table`: [R, blocks]."""
        self.block_table, self.stay = block_table, stay
        self.width = block_table.shape[1] * block_size

    def open(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Open a layer, as `Contexts.open`; the room holds zeros."""
        key, value = (pad(part, (0, 0, self.room, 0)) for part in layer.impl.gather(layer, kv_cache, self.block_table))
        return key, value
