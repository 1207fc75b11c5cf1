from functools import lru_cache

import torch
from torch import Tensor

from vllm_adaptive_tree.trees.shape import Shape


class SlicedMask:
    """The tree mask of a shape as the draft reads it, built once and sliced level by level (arXiv 2409.10744).

    The draft reads the root and the inner nodes, parents before children, so the leading square that ends with a level
    is the mask of the tree cut behind that level.
    """

    def __init__(self, shape: Shape):
        inner = [path for path in ((), *shape.paths) if shape.children_of(path)]
        self.whole = torch.tensor([[path[: len(other)] == other for other in inner] for path in inner])  # [S, S] bool
        self.ends = [sum(len(path) <= level for path in inner) for level in range(shape.depth)]

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, shape: Shape) -> "SlicedMask":
        return cls(shape)

    def behind(self, level: int) -> Tensor:
        """[S, S] bool of the nodes down to `level` (the root is level 0): node, its ancestors and itself."""
        return self.whole[: self.ends[level], : self.ends[level]]
