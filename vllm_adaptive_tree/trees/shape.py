"""A tree shape: positions without tokens, for static trees."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, product
from typing import Self

RankPath = tuple[int, ...]

EAGLE_1 = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
"""Li et al., arXiv 2401.15077."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree without tokens, as rank paths in level order: (0, 2) is the third child of the first child of the root.

    Parents and earlier siblings come first.
    """

    paths: tuple[RankPath, ...]

    def __post_init__(self) -> None:
        known: set[RankPath] = {()}
        for path in self.paths:
            if not path or path in known:
                raise ValueError(f"shape: the rank path {list(path)} is empty or listed twice")
            if path[:-1] not in known:
                raise ValueError(f"shape: the rank path {list(path)} has no parent {list(path[:-1])}; add it")
            if path[-1] and (*path[:-1], path[-1] - 1) not in known:
                raise ValueError(f"shape: {list(path)} needs its earlier sibling {[*path[:-1], path[-1] - 1]}; add it")
            known.add(path)

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]]) -> Self:
        """Shape from rank paths in any order."""
        return cls(tuple(sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))))

    @classmethod
    def k_config(cls, widths: Sequence[int], nodes: int | None = None) -> Self:
        """Shape (k1, .., kL): every node of level l - 1 has k_l children (MCSD, arXiv 2401.06706). (W, 1, .., 1) is a
        fork.

        Truncated to the first `nodes` nodes in level order.
        """
        ranks = [range(k if nodes is None else min(k, nodes)) for k in widths]
        levels = (product(*ranks[:level]) for level in range(1, len(widths) + 1))
        return cls(tuple(islice(chain.from_iterable(levels), nodes)))

    @classmethod
    def named(cls, name: str, nodes: int) -> Self:
        """ "eagle1", or the first `nodes` nodes of the full "binary" or "ternary" tree."""
        if name == "eagle1":
            return cls.of(tuple(map(int, path)) for path in EAGLE_1.split())
        k = {"binary": 2, "ternary": 3}[name]
        depth = 1
        while sum(k**level for level in range(1, depth + 1)) < nodes:
            depth += 1
        return cls.k_config([k] * depth, nodes)

    def cut(self, nodes: int) -> Self:
        """Shape of the first `nodes` nodes in level order."""
        return type(self)(self.paths[:nodes])

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def depth(self) -> int:
        return max((len(path) for path in self.paths), default=0)

    @property
    def max_children(self) -> int:
        return max((path[-1] + 1 for path in self.paths), default=0)

    def num_children(self, path: RankPath) -> int:
        return sum(other[:-1] == path for other in self.paths)
