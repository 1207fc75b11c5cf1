"""Tokens that the target has read and a draft that skipped steps has not."""

from typing import NamedTuple

import numpy as np

from vllm_adaptive_tree.engine.common.coverage import Coverage


class Gap(NamedTuple):
    row: int  # of the request in the batch
    start: int
    end: int  # the next forward reads from here on


class DraftBacklog:
    """On the host, by vLLM's index of the request. Blocks are shared by requests and outlive them, so in the end a gap
    is a property of the block (`Coverage`); while the batch skips drafting, two numbers per request are enough.

    The host has only an upper bound of the computed tokens, at most `slack` too high: a gap begins that much early, and
    what has been read there is read once more.
    """

    def __init__(self, coverage: Coverage, requests: int, slack: int, limit: int):
        """`coverage`: with all blocks read; `limit`: tokens that the draft can read."""
        self.coverage, self.slack, self.limit = coverage, slack, limit
        self.blocks: list[list[int]] = [[] for _ in range(requests)]
        self.start = np.zeros(requests, dtype=np.int64)
        self.end = np.zeros(requests, dtype=np.int64)  # skipped from `start` to here, not in `coverage` yet
        self.has_gap = np.zeros(requests, dtype=bool)  # `coverage` has a gap among the computed tokens

    def added(self, request: int, blocks: list[int], computed: int) -> None:
        """A new request with its first `computed` tokens in the cache already."""
        if computed:
            self.flush(self.end.nonzero()[0])  # they may be in the blocks of others
        self.blocks[request] = list(blocks)
        self.coverage.renew(blocks[-(-computed // self.coverage.block_size) :])
        self.has_gap[request] = self.coverage.reach(np.array(blocks, dtype=np.int64), computed) < computed

    def copied(self, source: int, target: int) -> None:
        """A block; a request's last tokens in it are new."""
        self.flush(self.end.nonzero()[0])
        self.coverage.filled[target] = self.coverage.filled[source]

    def extended(self, request: int, blocks: list[int]) -> None:
        self.blocks[request] += blocks
        self.coverage.renew(blocks)

    def removed(self, request: int) -> None:
        """Its blocks stay, or go to others."""
        self.flush(np.array([request]))
        self.blocks[request], self.has_gap[request] = [], False

    def skipped(self, requests: np.ndarray, computed: np.ndarray, scheduled: np.ndarray) -> None:
        """A step of `scheduled` tokens after the `computed` ones, all [R], which the draft does not read."""
        start = np.maximum(computed - self.slack, 0)
        again = self.end[requests] > 0
        self.start[requests] = np.where(again, np.minimum(self.start[requests], start), start)
        self.end[requests] = np.maximum(self.end[requests], computed + scheduled)

    def flush(self, requests: np.ndarray) -> None:
        """Write to `coverage` what these requests have skipped."""
        for request in requests[self.end[requests] > 0]:
            table = self._table(request)
            end = min(int(self.end[request]), len(table) * self.coverage.block_size)
            self.coverage.skipped(table, int(self.start[request]), end)
            self.end[request], self.has_gap[request] = 0, True

    def gaps(self, requests: np.ndarray, computed: np.ndarray) -> list[Gap]:
        """What the draft has to read of a batch before a step after the `computed` tokens [R]."""
        self.flush(requests)
        found = []
        for row in self.has_gap[requests].nonzero()[0]:
            end = min(int(computed[row]), self.limit)
            start = self.coverage.reach(self._table(requests[row]), end)
            self.has_gap[requests[row]] = start < end
            if start < end:
                found.append(Gap(int(row), start, end))
        return found

    def read(self, request: int, start: int, end: int, *, whole: bool) -> None:
        """From `start` to `end`; `whole`: that was the whole gap, and the step after it is read too."""
        table = self._table(request)
        if whole:
            self.coverage.renew(table[start // self.coverage.block_size :])
            self.has_gap[request] = False
        else:
            self.coverage.read(table, start, end)

    def _table(self, request: int) -> np.ndarray:
        return np.array(self.blocks[request], dtype=np.int64)
