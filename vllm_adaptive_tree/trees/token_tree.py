"""One draft tree on the host."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class TokenTree:
    """One draft tree, without its root (the last committed token).

    Nodes are in generation order, parents before children, so every prefix is the tree of a run that stopped earlier.
    `parents[i]` is a node, or -1 for the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def chain(cls, tokens: list[int]) -> Self:
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def depths(self) -> list[int]:
        """Depth of every node; the root is at 0, its children at 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def max_fanout(self) -> int:
        """The largest number of children of a node, at least 1."""
        return max(Counter(self.parents).values(), default=1)

    def branches(self) -> list[list[int]]:
        """The nodes in depth-first order, split after every leaf: each branch continues an earlier one or the root.

        Children are visited in generation order, so the first branch is `first_path`, the most likely one.
        """
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent].append(node)  # the last list is the root's
        branches: list[list[int]] = []
        open_nodes, before = children[-1][::-1], None
        while open_nodes:
            node = open_nodes.pop()
            if before is not None and self.parents[node] == before:
                branches[-1].append(node)
            else:
                branches.append([node])
            open_nodes += reversed(children[node])
            before = node
        return branches

    def path_to(self, node: int) -> list[int]:
        """The nodes from depth 1 down to `node`."""
        path = [node]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        return path[::-1]

    def prefix(self, length: int) -> "TokenTree":
        return self if length >= len(self) else TokenTree(self.tokens[:length], self.parents[:length])

    def first_path(self) -> list[int]:
        """The path from the root that always takes the child generated first."""
        nodes: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == (nodes[-1] if nodes else -1):
                nodes.append(node)
        return nodes

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The path accepted when `tokens` [1 + N] are sampled at the root (first) and at every node."""
        child = {edge: node for node, edge in enumerate(zip(self.parents, self.tokens, strict=True))}
        path = [-1]
        while (node := child.get((path[-1], tokens[1 + path[-1]]))) is not None:
            path.append(node)
        return path[1:]

    def check_integrity(self) -> None:
        """Raise AssertionError unless parents come first and siblings differ."""
        assert len(self.tokens) == len(self.parents)
        assert all(-1 <= parent < node for node, parent in enumerate(self.parents))
        assert len(set(zip(self.parents, self.tokens, strict=True))) == len(self), "siblings with equal tokens"
