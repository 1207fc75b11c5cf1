"""The tree mask of a fixed shape, built once and sliced level by level (arXiv 2409.10744)."""

from functools import lru_cache

import torch
from torch import Tensor

from vllm_adaptive_tree.trees.shape import Shape


class SlicedMask:
    """The tree mask over the nodes that the draft reads: the root and the inner nodes, parents before children.

    The leading square that ends with a level is the mask of the tree truncated after that level.
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

    of, behind = cached, upto  # the names of release 0.1, for one release
