"""Counts of the most bytes that a piece of code holds, and of the bytes that it reads and writes, on CPU tensors."""

import math
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

IDLE = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view"}
"""Operations that move nothing, besides views."""


class Allocated(TorchDispatchMode):
    """Mode that tracks storages made inside, as long as they live; checked after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.moved = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(one) for one in tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        self.alive = {place: one for place, one in self.alive.items() if not one[0].expired()}
        for one in tensors(result):
            place = id_of(one)
            if place not in given:
                self.alive[place] = StorageWeakRef(one.untyped_storage()), one.untyped_storage().nbytes()
        self.peak = max(self.peak, self.held)
        if not (function.is_view or function._opname in IDLE):
            self.moved += sum(bytes_of(one) for one in tensors((args, kwargs, result)))
        return result

    @property
    def held(self) -> int:
        return sum(size for ref, size in self.alive.values() if not ref.expired())


def tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes that an operation on it reads or writes; an expanded dimension counts once."""
    shape = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.element_size() * math.prod(shape)


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
