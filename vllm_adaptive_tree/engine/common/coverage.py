"""Coverage of the KV cache's blocks by a draft that may skip steps."""

from collections.abc import Sequence

import numpy as np


class Coverage:
    """Leading tokens of each block of the cache for which the draft has keys and values.

    Target and draft share block numbers. A draft that skips steps leaves gaps. Blocks outlive requests through prefix
    hits and change hands, so coverage is a property of the block and not of the request.
    """

    def __init__(self, blocks: int, block_size: int):
        self.filled = np.zeros(blocks, dtype=np.int64)  # leading tokens of each block that the draft has read
        self.block_size = block_size

    def renew(self, blocks: Sequence[int] | np.ndarray | slice) -> None:
        """Count these as read until something is skipped there, for callers that do not report every read."""
        self.filled[blocks] = self.block_size

    def reach(self, table: np.ndarray, end: int) -> int:
        """Number of a request's first `end` tokens that the draft has read without a gap; `table`: its blocks."""
        count = -(-end // self.block_size)
        filled = self.filled[table[:count]]
        gaps = (filled < self.block_size).nonzero()[0]
        if not len(gaps):
            return end
        return min(end, int(gaps[0]) * self.block_size + int(filled[gaps[0]]))

    def read(self, table: np.ndarray, start: int, end: int) -> None:
        """Note that the draft has read the tokens from `start` to `end`; K/V after that is invalid."""
        self._fill(table, start, end, end)

    def skipped(self, table: np.ndarray, start: int, end: int) -> None:
        """Note that the target has written the tokens from `start` to `end`, and the draft has not read them."""
        self._fill(table, start, end, start)

    def _fill(self, table: np.ndarray, start: int, end: int, covered: int) -> None:
        assert start >= 0, start
        first, last = start // self.block_size, -(-end // self.block_size)
        blocks = table[first:last].tolist()  # mostly one: faster than as an array
        for place, block in enumerate(blocks, first):
            filled = min(max(covered - place * self.block_size, 0), self.block_size)
            # the first block keeps what it had before `start`
            self.filled[block] = min(filled, self.filled[block]) if covered <= start else filled
