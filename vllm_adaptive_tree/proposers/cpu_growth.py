"""Best-first growth on CPUs: one compiled loop per level, as launching PyTorch operations costs more than their work.

Grows the same trees as `BestFirst`; ties go to the earlier column and the earlier sibling.
"""

# mypy: disable-error-code="untyped-decorator"

import math
from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_adaptive_tree.compiled import njit
from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.proposers.base import Proposal, Proposer, Request
from vllm_adaptive_tree.proposers.row_scan import Scan, scan
from vllm_adaptive_tree.trees import TreeBatch

TOKEN, PARENT, DEPTH, NUMBER, CELL = range(5)
"""Rows of `CPUGrowth.nodes`. NUMBER is the drafter's slot, 0 the root; -1 for nodes whose children are not drafted.
CELL as in `Proposal`. Rows of candidates: TOKEN, the column of the parent, and 2: CELL."""
VALUE, PATH = range(2)
"""Rows of `CPUGrowth.front_value` and of candidates: as in `best_first.Candidates`."""


class CPUGrowth(NamedTuple):
    """R trees so far: the n best nodes, by value."""

    nodes: NDArray[np.int64]  # [5, R, n], token -1: empty
    value: NDArray[np.float32]  # [R, n]: descending
    front: NDArray[np.int64]  # [2, R, n]: tokens and parent slots of the frontier, token -1: unused
    front_value: NDArray[np.float32]  # [2, R, n]: of the frontier, -inf: unused
    level: int
    first: int  # slot of the frontier's first column
    num_planned: int  # children per node
    request: Request
    key: Any = None  # what a proposer knows of each request


class Level(NamedTuple):
    """Arguments of a compiled level. `grown`: the first four fields of the next `CPUGrowth`, to fill."""

    scan: Scan
    known: NDArray[np.float32]  # [2, R, W]: values and paths of the frontier, -inf in dead rows
    trees: tuple[Any, ...]  # nodes and values so far
    grown: tuple[Any, ...]
    step: tuple[float, float, int, int, int]
    """Threshold, floor, level, slot of the frontier's first column, and of the next."""


class CPUBestFirst(Proposer):
    """Mixin before a best-first proposer among the bases of a class. Its growth is a `CPUGrowth`."""

    def check(self, rows: Rows, temperature: Tensor, used: Tensor | None = None) -> tuple[Rows, Tensor]:
        """As `Proposer.check`, in the one pass over the logits; columns that are not `used` count as dead."""
        return scan(rows, temperature, used)

    @abstractmethod
    def planned(self, nodes: int, vocabulary: int) -> int:
        """Children planned for each node."""

    @abstractmethod
    def grow(self, level: Level, growth: CPUGrowth) -> None:
        """Fill `level.grown`."""

    def key(self, request: Request) -> Any:
        """What is known of each request for all levels."""
        return None

    def begin(self, rows: Rows, *, nodes: int, request: Request) -> Any:
        requests = len(rows.logits)
        none = np.full((5, requests, nodes), -1)
        none[[PARENT, DEPTH]] = 0
        value = np.full((requests, nodes), -np.inf, dtype=np.float32)
        root = np.zeros((2, requests, 1), dtype=np.float32)
        return self.extend(CPUGrowth(none, value, none[:2], root, 0, 0, 0, request, self.key(request)), rows)

    def growing(self, growth: Any) -> Tensor:
        return torch.from_numpy((growth.front[TOKEN, :, 0] >= 0) & (growth.level < self.max_depth))

    def frontier(self, growth: Any) -> Frontier:
        return Frontier(*torch.from_numpy(growth.front))

    def extend(self, growth: Any, rows: Rows) -> Any:
        assert rows.dead is not None
        _, width, vocabulary = rows.logits.shape
        # columns of dead rows count as unused
        known = np.where(rows.dead.numpy(), np.float32(-np.inf), growth.front_value[:, :, :width])
        trees = growth.nodes, growth.value
        nodes, best, front = map(np.empty_like, (*trees, growth.nodes[:2]))
        grown = nodes, best, front, np.empty((2, *best.shape), np.float32)
        level, first = growth.level + 1, growth.first + width
        step = (float(self.threshold), float(self.floor), level, growth.first, first)
        self.grow(Level(rows.scan, known, trees, grown, step), growth)
        planned = self.planned(growth.value.shape[1], vocabulary)
        return CPUGrowth(*grown, level, first, planned, growth.request, growth.key)

    def finish(self, growth: Any) -> Proposal:
        parent, read = np.empty_like(growth.nodes[:2])
        num_planned = np.full((parent.shape[0], 1 + parent.shape[1]), growth.num_planned)
        _finish(growth.nodes, growth.first, parent, read, num_planned)
        nodes = torch.from_numpy(growth.nodes)
        tree = TreeBatch(nodes[TOKEN], torch.from_numpy(parent), nodes[DEPTH], torch.from_numpy(growth.value))
        cell = None if self.acceptance is None else nodes[CELL]
        return Proposal(tree, torch.from_numpy(read), torch.from_numpy(num_planned), cell)


KNOWN = "float32[:, :, ::1]"
TREES = "Tuple((int64[:, :, ::1], float32[:, ::1]))"
GROWN = "Tuple((int64[:, :, ::1], float32[:, ::1], int64[:, :, ::1], float32[:, :, ::1]))"
STEP = "Tuple((float64, float64, int64, int64, int64))"
"""Types of the fields of a `Level`."""


@njit("int64(int64, float32[:, ::1], int64[:, ::1], float32, float32, int64, int64, int64)")
def insert(found, values, columns, value, path, token, column, cell):  # type: ignore[no-untyped-def]
    """Insert a candidate into the `found` best so far, `values` [2, n] and `columns` [3, n] by descending value, after
    its equals; returns their number."""
    n = values.shape[1]
    if not value > values[VALUE, n - 1]:
        return found
    found = min(found + 1, n)
    at = found - 1
    while at > 0 and values[VALUE, at - 1] < value:
        for row in range(2):
            values[row, at] = values[row, at - 1]
        for row in range(3):
            columns[row, at] = columns[row, at - 1]
        at -= 1
    values[VALUE, at], values[PATH, at] = value, path
    columns[0, at], columns[1, at], columns[2, at] = token, column, cell
    return found


@njit(f"void(int64, int64, float32[:, ::1], int64[:, ::1], float32[::1], {TREES}, {GROWN}, {STEP})")
def merge(r, found, values, columns, known, trees, grown, step):  # type: ignore[no-untyped-def]
    """Merge the `found` best candidates of a level, by value, into tree r, and set its frontier.

    Of two equal values the earlier node comes first, so parents do. `known`: path [W] of the last frontier, -inf for a
    dead row, which has no slot.
    """
    (nodes, best), (after, value_after, front, front_value) = trees, grown
    threshold, floor, level, above, first = step
    n, old, new, gain = best.shape[1], 0, 0, 0.0
    slot = np.empty(n, np.int64)  # position of each candidate in the tree
    for at in range(n):
        if new >= found or best[r, old] >= values[VALUE, new]:
            value_after[r, at] = best[r, old]
            for row in range(5):
                after[row, r, at] = nodes[row, r, old]
            read = nodes[NUMBER, r, old] - above
            if 0 <= read < len(known) and known[read] == -np.inf:
                after[NUMBER, r, at] = -1
            old += 1
        else:
            value_after[r, at] = values[VALUE, new]
            after[TOKEN, r, at], after[PARENT, r, at] = columns[0, new], above + columns[1, new]
            after[DEPTH, r, at], after[NUMBER, r, at], after[CELL, r, at] = level, -1, columns[2, new]
            slot[new] = at
            new += 1
        gain += math.exp(value_after[r, at]) - math.exp(best[r, at])
    least, column = max(value_after[r, n - 1], floor), 0
    if gain > threshold:
        for at in range(new):
            if min(values[VALUE, at], values[PATH, at]) > least:
                after[NUMBER, r, slot[at]] = first + column
                front[TOKEN, r, column], front[PARENT, r, column] = columns[0, at], above + columns[1, at]
                front_value[VALUE, r, column] = values[VALUE, at]
                front_value[PATH, r, column] = values[PATH, at]
                column += 1
    for at in range(column, n):
        front[TOKEN, r, at], front[PARENT, r, at] = -1, 0
        front_value[VALUE, r, at] = front_value[PATH, r, at] = -np.inf


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
