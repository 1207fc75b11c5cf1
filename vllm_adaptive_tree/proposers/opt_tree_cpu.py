"""OPT-Tree on CPUs: one compiled loop per level, since launching PyTorch operations costs more than their work.

Grows the same trees as `OptTree`; ties go to the earlier column and the smaller token.
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
from vllm_adaptive_tree.proposers.base import Proposal, Request, log_softmax_at
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.vocab_ops import joint_topk

# A vLLM engine in this process reads `__dict__` of every object in every module. LLVM's library answers any attribute
# with a function, so it gets a real `__dict__`. See `patches/README.md`.
getattr(ffi.lib, "_fntab", {}).setdefault("__dict__", {})

COMPILED_LIMIT = 1 << 18
"""Most logits per level for which the compiled top-k is faster; beyond it, PyTorch's threads are."""
BLOCK = 32
"""Entries compared at once: a short loop of known length is vectorised."""
TOKEN, PARENT, DEPTH, NUMBER = range(4)
"""Rows of `CPUGrowth.nodes`. NUMBER is the drafter's slot, 0 the root; -1 for nodes whose children are not drafted."""


class CPUGrowth(NamedTuple):
    """R trees so far: the n best nodes, by value."""

    nodes: NDArray[np.int64]  # [4, R, n], token -1: empty
    value: NDArray[np.float32]  # [R, n]: log path probability, descending
    front: NDArray[np.int64]  # [2, R, n]: tokens and parent slots of the frontier, token -1: unused
    path: NDArray[np.float32]  # [R, n]: log path probability of the frontier, -inf: unused
    level: int
    first: int  # slot of the frontier's first column
    num_planned: int  # children per node
    request: Request


class OptTreeCPU(OptTree):
    """OPT-Tree whose growth state is a `CPUGrowth`."""

    @classmethod
    def of(cls, proposer: OptTree) -> "OptTreeCPU":
        return cls(max_depth=proposer.max_depth, threshold=proposer.threshold)

    def begin(self, rows: Rows, *, nodes: int, request: Request) -> Any:
        requests = len(rows.logits)
        none = np.full((4, requests, nodes), -1)
        none[[PARENT, DEPTH]] = 0
        nothing = np.full((requests, nodes), -np.inf, dtype=np.float32)
        root = np.zeros((requests, 1), dtype=np.float32)
        return self.extend(CPUGrowth(none, nothing, none[:2], root, 0, 0, 0, request), rows)

    def growing(self, growth: Any) -> Tensor:
        return torch.from_numpy((growth.front[0, :, 0] >= 0) & (growth.level < self.max_depth))

    def frontier(self, growth: Any) -> Frontier:
        return Frontier(*torch.from_numpy(growth.front))

    def extend(self, growth: Any, rows: Rows) -> Any:
        assert rows.dead is not None
        log_probs = log_softmax_at(rows.logits, growth.request.temperature[:, None]).float()  # [R, W, V]
        # columns of dead rows count as unused
        path_above = np.where(rows.dead.numpy(), np.float32(-np.inf), growth.path[:, : log_probs.shape[1]])
        first, level = growth.first + log_probs.shape[1], growth.level + 1
        trees, n = (growth.nodes, growth.value), growth.value.shape[1]
        nodes, value, front, path = map(np.empty_like, (*trees, growth.nodes[:2], growth.value))
        grown = nodes, value, front, path
        step = (float(self.threshold), float(self.floor), level, growth.first, first)
        if log_probs.numel() <= COMPILED_LIMIT:
            _grow(log_probs.contiguous().numpy(), path_above, trees, grown, step)
        else:
            scores, column, token = (
                part.contiguous().numpy() for part in joint_topk(log_probs, torch.from_numpy(path_above), n)
            )
            _grow_by(scores, token, column, path_above, trees, grown, step)
        return CPUGrowth(*grown, level, first, min(n, log_probs.shape[-1]), growth.request)

    def finish(self, growth: Any) -> Proposal:
        parent, read = np.empty_like(growth.nodes[:2])
        num_planned = np.full((parent.shape[0], 1 + parent.shape[1]), growth.num_planned)
        _finish(growth.nodes, growth.first, parent, read, num_planned)
        tokens, depth, value = growth.nodes[TOKEN], growth.nodes[DEPTH], growth.value
        tree = TreeBatch(*(torch.from_numpy(part) for part in (tokens, parent, depth, value)))
        return Proposal(tree, torch.from_numpy(read), torch.from_numpy(num_planned))


# The signatures make numba compile at import, not within a step. `trees` are the trees so far, `grown` the first four
# fields of `CPUGrowth`, to fill. `step` is (threshold, floor, level, slot of the frontier's first column, and of the
# next).
_TREES = "Tuple((int64[:, :, ::1], float32[:, ::1]))"
_GROWN = "Tuple((int64[:, :, ::1], float32[:, ::1], int64[:, :, ::1], float32[:, ::1]))"
_STEP = "Tuple((float64, float64, int64, int64, int64))"


@njit
def _topk(log_probs, path, value, token, column):  # type: ignore[no-untyped-def]
    """Top n of log_probs [W, V] + path [W], descending, into three arrays [n]; returns their number."""
    n, found, entries = len(value), 0, log_probs.shape[1]
    value.fill(-np.inf)
    for w in range(len(log_probs)):
        above = path[w]
        if above == -np.inf:
            continue
        for start in range(0, entries, BLOCK):
            if start + BLOCK <= entries:
                hit, worst = np.int32(0), value[n - 1]
                for at in range(BLOCK):
                    hit |= np.int32(log_probs[w, start + at] + above > worst)
                if not hit:
                    continue
            for one in range(start, min(start + BLOCK, entries)):
                new = log_probs[w, one] + above
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
def _merge(r, found, value, token, column, known, trees, grown, step):  # type: ignore[no-untyped-def]
    """Merge the `found` best candidates of a level, by value, into tree r, and set its frontier.

    Of two equal values the earlier node comes first, so parents do. `known`: path [W] of the last frontier, -inf for a
    dead row, which has no slot.
    """
    (nodes, best), (after, value_after, front, path) = trees, grown
    threshold, floor, level, above, first = step
    n, old, new, gain = best.shape[1], 0, 0, 0.0
    slot = np.empty(n, np.int64)  # position of each candidate in the tree
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


@njit(f"(float32[:, :, ::1], float32[:, ::1], {_TREES}, {_GROWN}, {_STEP})")
def _grow(log_probs, path, trees, grown, step):  # type: ignore[no-untyped-def]
    """Add a level from the log probabilities [R, W, V] and log path probabilities [R, W] of a frontier."""
    n = trees[1].shape[1]
    value, token, column = np.empty(n, np.float32), np.empty(n, np.int64), np.empty(n, np.int64)
    for r in range(len(log_probs)):
        found = _topk(log_probs[r], path[r], value, token, column)
        _merge(r, found, value, token, column, path[r], trees, grown, step)


@njit(f"(float32[:, ::1], int64[:, ::1], int64[:, ::1], float32[:, ::1], {_TREES}, {_GROWN}, {_STEP})")
def _grow_by(value, token, column, path, trees, grown, step):  # type: ignore[no-untyped-def]
    """Add a level from candidates [R, C] that are already sorted by value."""
    for r in range(len(value)):
        found = 0
        while found < value.shape[1] and value[r, found] > -np.inf:
            found += 1
        _merge(r, found, value[r], token[r], column[r], path[r], trees, grown, step)


@njit("(int64[:, :, ::1], int64, int64[:, ::1], int64[:, ::1], int64[:, ::1])")
def _finish(nodes, first, parent, read, num_planned):  # type: ignore[no-untyped-def]
    """Turn parents into node indices; slots from `first` on were never read, and their nodes get no children.

    Nor does the root of an empty tree: its row was dead.
    """
    slot = np.empty(max(first, 1), np.int64)
    for r in range(len(parent)):
        slot[0] = -1
        for at in range(parent.shape[1]):
            number = nodes[NUMBER, r, at]
            if 0 <= number < first:
                slot[number] = at
                read[r, at] = number
            else:
                read[r, at], num_planned[r, 1 + at] = -1, 0
            parent[r, at] = slot[nodes[PARENT, r, at]]
        if nodes[TOKEN, r, 0] < 0:
            num_planned[r, 0] = 0
