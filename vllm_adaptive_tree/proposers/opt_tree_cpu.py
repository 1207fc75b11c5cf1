"""OPT-Tree on CPUs."""

# mypy: disable-error-code="untyped-decorator"

from typing import Self

import numpy as np

from vllm_adaptive_tree.compiled import njit
from vllm_adaptive_tree.proposers.cpu_growth import (
    GROWN,
    KNOWN,
    PATH,
    STEP,
    TREES,
    VALUE,
    CPUBestFirst,
    CPUGrowth,
    Level,
    insert,
    merge,
)
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.proposers.row_scan import LN2, SCAN, best_entries


class OptTreeCPU(CPUBestFirst, OptTree):
    """OPT-Tree by `CPUBestFirst`; of equal siblings the smaller token comes first."""

    @classmethod
    def of(cls, proposer: OptTree) -> Self:
        return cls(max_depth=proposer.max_depth, threshold=proposer.threshold)

    def planned(self, nodes: int, vocabulary: int) -> int:
        return min(nodes, vocabulary)

    def grow(self, level: Level, growth: CPUGrowth) -> None:
        _grow(tuple(level.scan), *level[1:])


@njit(f"({SCAN}, {KNOWN}, {TREES}, {GROWN}, {STEP})")
def _grow(scan, known, trees, grown, step):  # type: ignore[no-untyped-def]
    """Add a level: the best paths that extend the frontier by one token."""
    n, width = trees[1].shape[1], known.shape[2]
    values, columns = np.empty((2, n), np.float32), np.empty((3, n), np.int64)
    tokens, logits = np.empty(n, np.int64), np.empty(n, np.float32)
    _, _, scale, shift, _, _, total = scan
    for r in range(known.shape[1]):
        found = 0
        values.fill(-np.inf)
        for w in range(width):
            path, row = known[PATH, r, w], r * width + w
            if path == -np.inf:
                continue
            slope, log_total = LN2 * scale[row], LN2 * (shift[row] + np.log2(total[row]))
            least = (max(values[VALUE, n - 1], trees[1][r, n - 1]) - path + log_total) / slope
            for at in range(best_entries(scan, row, least, tokens, logits)):
                # float32: equal paths stay equal; a probability that rounds above 1 would stand before its parent
                value = path + np.float32(min(logits[at] * slope - log_total, 0.0))
                found = insert(found, values, columns, value, value, tokens[at], w, -1)
        merge(r, found, values, columns, known[PATH, r], trees, grown, step)
