"""Depths and branches of the trees of a batch, by compiled loops."""

# mypy: disable-error-code="untyped-decorator"

from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from vllm_adaptive_tree.compiled import njit


class Branches(NamedTuple):
    """M nodes of R trees, tree after tree, each in generation order."""

    start: NDArray[np.int64]  # [R + 1]: first node of each tree
    depth: NDArray[np.int64]  # [M]
    chain: NDArray[np.bool_]  # [R]: trees without a second branch
    order: NDArray[np.int64]  # [M]: nodes, from 0 in each tree, depth first as in `TokenTree.branches`
    begins: NDArray[np.bool_]  # [M]: places in the order where a branch begins

    @classmethod
    def of(cls, parent: NDArray[np.int64], sizes: list[int]) -> Self:
        """Of trees of these `sizes`, from the `parent` [M] of every node in its tree, -1 the root."""
        start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        depth, order = np.empty((2, len(parent)), np.int64)
        found = cls(start, depth, np.empty(len(sizes), bool), order, np.empty(len(parent), bool))
        _fill(parent, *found)
        return found

    def lists(self) -> list[list[list[int]]]:
        """The branches of each tree, as `TokenTree.branches` gives them."""
        order, at = self.order.tolist(), self.begins.nonzero()[0]
        branches = [order[begin:end] for begin, end in pairwise([*at.tolist(), len(order)])]
        first = np.searchsorted(at, self.start).tolist()
        return [branches[begin:end] for begin, end in pairwise(first)]


@njit("(int64[::1], int64[::1], int64[::1], boolean[::1], int64[::1], boolean[::1])")
def _fill(parent, start, depth, chain, order, begins):  # type: ignore[no-untyped-def]
    """Fill all fields of `Branches` but the first."""
    for tree in range(len(chain)):
        first, size = start[tree], start[tree + 1] - start[tree]
        child, sibling = np.full(size + 1, -1), np.full(size, -1)  # the last child is the root's; next siblings
        chain[tree] = True
        for node in range(size):
            above = parent[first + node]
            depth[first + node] = 1 if above < 0 else depth[first + above] + 1
            chain[tree] &= above == node - 1
        for node in range(size - 1, -1, -1):
            above = parent[first + node]
            place = size if above < 0 else above
            sibling[node], child[place] = child[place], node
        node, begin = child[size], True
        for at in range(first, first + size):
            order[at], begins[at] = node, begin
            begin = child[node] < 0
            if not begin:
                node = child[node]
                continue
            while node >= 0 and sibling[node] < 0:
                node = parent[first + node]
            if node >= 0:
                node = sibling[node]
