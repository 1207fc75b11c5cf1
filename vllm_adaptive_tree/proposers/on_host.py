"""OPT-Tree where starting an operation costs more than its work: on a CPU, each level in one compiled loop.

The same trees as `OptTree` grows; ties go to the earlier column and the smaller token.
"""

# mypy: disable-error-code="untyped-decorator"

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite.binding import ffi
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.proposers.base import Proposal, Request, log_law
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.vocab_ops import joint_topk

# A vLLM engine that starts in this process reads the `__dict__` of all that modules hold; LLVM's library, to which any
# name is a function, would answer with one. The ledger: `patches/README.md`.
getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})

SORT_LIMIT = 1 << 18
"""Entries of the laws of a level; of more, PyTorch's threads find the largest sooner."""
BLOCK = 32
"""Entries compared at once: a short loop of known length becomes a few instructions."""
TOKEN, PARENT, DEPTH, NUMBER = range(4)
"""Rows of `Grown.nodes`. A number is the drafter's, 0 the root's; of nodes whose children are not drafted -1."""


class Grown(NamedTuple):
    """R trees so far: of all nodes the n best, by value."""

    nodes: NDArray[np.int64]  # [4, R, n], token -1 where there is none
    value: NDArray[np.float32]  # [R, n]: log path probability, falling
    front: NDArray[np.int64]  # [2, R, n]: tokens and parents' numbers of the frontier, token -1: unused
    path: NDArray[np.float32]  # [R, n]: log path probability of the frontier, -inf: unused
    level: int
    first: int  # number of the frontier's first column
    drawn: int  # children of a node
    request: Request


class OptTreeOnHost(OptTree):
    """Its growth is a `Grown`."""

    @classmethod
    def of(cls, proposer: OptTree) -> "OptTreeOnHost":
        return cls(max_depth=proposer.max_depth, threshold=proposer.threshold)

    def begin(self, rows: Rows, *, nodes: int, request: Request) -> Any:
        requests = len(rows.logits)
        none = np.full((4, requests, nodes), -1)
        none[[PARENT, DEPTH]] = 0
        nothing = np.full((requests, nodes), -np.inf, dtype=np.float32)
        root = np.zeros((requests, 1), dtype=np.float32)
        return self.extend(Grown(none, nothing, none[:2], root, 0, 0, 0, request), rows)

    def growing(self, growth: Any) -> Tensor:
        return torch.from_numpy((growth.front[0, :, 0] >= 0) & (growth.level < self.max_depth))

    def frontier(self, growth: Any) -> Frontier:
        return Frontier(*torch.from_numpy(growth.front))

    def extend(self, growth: Any, rows: Rows) -> Any:
        assert rows.dead is not None
        law = log_law(rows.logits, growth.request.temperature[:, None]).float()  # [R, W, V]
        above = growth.path[:, : law.shape[1]]
        above = np.where(rows.dead.numpy(), np.float32(-np.inf), above)  # columns of dead rows count as unused
        first, level = growth.first + law.shape[1], growth.level + 1
        trees, most = (growth.nodes, growth.value), growth.value.shape[1]
        nodes, value, front, path = map(np.empty_like, (*trees, growth.nodes[:2], growth.value))
        grown = nodes, value, front, path
        place = (float(self.threshold), float(self.floor), level, growth.first, first)
        if law.numel() <= SORT_LIMIT:
            _grow(law.contiguous().numpy(), above, trees, grown, place)
        else:
            found, column, token = (one.contiguous().numpy() for one in joint_topk(law, torch.from_numpy(above), most))
            _grow_by(found, token, column, above, trees, grown, place)
        return Grown(*grown, level, first, min(most, law.shape[-1]), growth.request)

    def finish(self, growth: Any) -> Proposal:
        parent, read = np.empty_like(growth.nodes[:2])
        drawn = np.full((parent.shape[0], 1 + parent.shape[1]), growth.drawn)
        _finish(growth.nodes, growth.first, parent, read, drawn)
        tokens, depth, value = growth.nodes[TOKEN], growth.nodes[DEPTH], growth.value
        tree = TreeBatch(*(torch.from_numpy(one) for one in (tokens, parent, depth, value)))
        return Proposal(tree, torch.from_numpy(read), torch.from_numpy(drawn))


# Signatures: compiled when this is imported, not within a step. `trees` are those so far, `grown` the first four of
# `Grown`, to be filled, and `place` is (threshold, floor, level, number of the frontier's first column, and of the
# next one's).
_TREES = "Tuple((int64[:, :, ::1], float32[:, ::1]))"
_GROWN = "Tuple((int64[:, :, ::1], float32[:, ::1], int64[:, :, ::1], float32[:, ::1]))"
_PLACE = "Tuple((float64, float64, int64, int64, int64))"


@njit
def _largest(law, path, value, token, column):  # type: ignore[no-untyped-def]
    """The largest of law [W, V] + path [W] in falling order into three rows [n]; how many there are."""
    n, found, entries = len(value), 0, law.shape[1]
    value.fill(-np.inf)
    for w in range(len(law)):
        above = path[w]
        if above == -np.inf:
            continue
        for start in range(0, entries, BLOCK):
            if start + BLOCK <= entries:
                hit, worst = np.int32(0), value[n - 1]
                for at in range(BLOCK):
                    hit |= np.int32(law[w, start + at] + above > worst)
                if not hit:
                    continue
            for one in range(start, min(start + BLOCK, entries)):
                new = law[w, one] + above
                if not new > value[n - 1]:
                    continue
                found = min(found + 1, n)
                at = found - 1
                while at > 0 and value[at - 1] < new:
                    value[at], token[at], column[at] = value[at - 1], token[at - 1], column[at - 1]
                    at -= 1
                value[at], token[at], column[at] = new, one, w
    return found


@njit
def _settle(r, found, value, token, column, known, trees, grown, place):  # type: ignore[no-untyped-def]
    """Tree r and its frontier, from the `found` largest candidates of a level, by value. Of two equals the older comes
    first, so parents come first. `known`: path [W] of the last frontier, -inf: a dead row, which has no number."""
    (nodes, best), (after, value_after, front, path) = trees, grown
    threshold, floor, level, above, first = place
    n, old, new, gain = best.shape[1], 0, 0, 0.0
    slot = np.empty(n, np.int64)  # of each candidate in the tree
    for at in range(n):
        if new >= found or best[r, old] >= value[new]:
            value_after[r, at] = best[r, old]
            for row in range(4):
                after[row, r, at] = nodes[row, r, old]
            read = nodes[NUMBER, r, old] - above
            if 0 <= read < len(known) and known[read] == -np.inf:
                after[NUMBER, r, at] = -1
            old += 1
        else:
            value_after[r, at] = value[new]
            after[TOKEN, r, at], after[PARENT, r, at] = token[new], above + column[new]
            after[DEPTH, r, at], after[NUMBER, r, at] = level, -1
            slot[new] = at
            new += 1
        gain += math.exp(value_after[r, at]) - math.exp(best[r, at])
    least = max(value_after[r, n - 1], floor)
    for at in range(n):
        if gain > threshold and at < new and value[at] > least:
            after[NUMBER, r, slot[at]] = first + at
            front[TOKEN, r, at], front[PARENT, r, at], path[r, at] = token[at], above + column[at], value[at]
        else:
            front[TOKEN, r, at], front[PARENT, r, at], path[r, at] = -1, 0, -np.inf


@njit(f"(float32[:, :, ::1], float32[:, ::1], {_TREES}, {_GROWN}, {_PLACE})")
def _grow(law, path, trees, grown, place):  # type: ignore[no-untyped-def]
    """One level more from the log law [R, W, V] and the log path probabilities [R, W] of a frontier."""
    n = trees[1].shape[1]
    value, token, column = np.empty(n, np.float32), np.empty(n, np.int64), np.empty(n, np.int64)
    for r in range(len(law)):
        found = _largest(law[r], path[r], value, token, column)
        _settle(r, found, value, token, column, path[r], trees, grown, place)


@njit(f"(float32[:, ::1], int64[:, ::1], int64[:, ::1], float32[:, ::1], {_TREES}, {_GROWN}, {_PLACE})")
def _grow_by(value, token, column, path, trees, grown, place):  # type: ignore[no-untyped-def]
    """The same from the candidates [R, C] themselves, by value."""
    for r in range(len(value)):
        found = 0
        while found < value.shape[1] and value[r, found] > -np.inf:
            found += 1
        _settle(r, found, value[r], token[r], column[r], path[r], trees, grown, place)


@njit("(int64[:, :, ::1], int64, int64[:, ::1], int64[:, ::1], int64[:, ::1])")
def _finish(nodes, first, parent, read, drawn):  # type: ignore[no-untyped-def]
    """Parents as slots of the tree; numbers from `first` on were never read, and their nodes get no children. Nor does
    the root of an empty tree: its row was dead."""
    slot = np.empty(max(first, 1), np.int64)
    for r in range(len(parent)):
        slot[0] = -1
        for at in range(parent.shape[1]):
            number = nodes[NUMBER, r, at]
            if 0 <= number < first:
                slot[number] = at
                read[r, at] = number
            else:
                read[r, at], drawn[r, 1 + at] = -1, 0
            parent[r, at] = slot[nodes[PARENT, r, at]]
        if nodes[TOKEN, r, 0] < 0:
            drawn[r, 0] = 0
