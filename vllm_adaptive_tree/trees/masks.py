"""The tree mask: dense, packed into bits for attention kernels, and of a fixed shape, sliced level by level."""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_adaptive_tree.trees.shape import Shape

WORD = 64


def ancestor_mask(parent: Tensor) -> Tensor:
    """Ancestor-or-self mask of R trees, the root first: [R, 1 + N, 1 + N] bool.

    An empty slot sees the root and itself.

    Args:
        parent: [R, N] int64, every parent before its children; -1: the root.
    """
    seen = torch.eye(1 + parent.shape[1], dtype=torch.bool, device=parent.device)
    seen[:, 0] = True
    seen = seen.expand(len(parent), -1, -1)
    for up in jumps(parent):
        seen = seen | seen.gather(1, up[:, :, None].expand_as(seen))
    return seen


def ancestor_bits(parent: Tensor) -> Tensor:
    """`ancestor_mask` as bits, 1/8 byte per entry: [R, 1 + N, W] int64, W = ceil((1 + N) / 64).

    Bit j of word w of a row: row 64 * w + j is its ancestor or itself. A zero word lets a kernel skip a whole tile.
    """
    row = torch.arange(1 + parent.shape[1], device=parent.device)
    word = torch.arange(-(-len(row) // WORD), device=parent.device)
    itself = torch.ones_like(row) << row % WORD  # bit 63 is the sign
    bits = torch.where(row[:, None] // WORD == word, itself[:, None], 0)  # [1 + N, W]
    bits = (bits | bits[:1]).repeat(len(parent), 1, 1)  # every row sees the root
    for up in jumps(parent):
        bits = bits | bits.gather(1, up[:, :, None].expand_as(bits))
    return bits


def jumps(parent: Tensor) -> Iterator[Tensor]:
    """The ancestors 1, 2, 4, ... levels up, [R, N + 1] each: node i in slot i + 1; the root, slot 0, is its own parent.

    The host does not know the depth, so log2(N) jumps, enough for a chain.
    """
    up = pad(parent + 1, (1, 0))
    for _ in range((parent.shape[1] - 1).bit_length()):
        yield up
        up = up.gather(1, up)


class SlicedMask:
    """The tree mask over the nodes that the draft reads: the root and the inner nodes, parents before children.

    Built once per shape, and sliced level by level (arXiv 2409.10644): the leading square that ends with a level is the
    mask of the tree truncated after that level.
    """

    def __init__(self, shape: Shape):
        inner = [path for path in ((), *shape.paths) if shape.num_children(path)]
        self.whole = torch.tensor([[path[: len(other)] == other for other in inner] for path in inner])  # [S, S] bool
        self.ends = [sum(len(path) <= level for path in inner) for level in range(shape.depth)]

    @classmethod
    @lru_cache(maxsize=64)
    def cached(cls, shape: Shape) -> "SlicedMask":
        return cls(shape)

    def upto(self, level: int) -> Tensor:
        """[S, S] bool, the ancestor-or-self mask of the nodes down to `level` (the root is level 0)."""
        return self.whole[: self.ends[level], : self.ends[level]]
