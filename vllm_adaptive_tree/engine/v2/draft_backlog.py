"""Tokens that the target has read, but not a draft that skipped steps."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vllm_adaptive_tree.engine.common.coverage import Coverage
from vllm_adaptive_tree.engine.common.loads import num_loaded

MAX_UNACKED_STEPS = 2
"""Most steps in flight whose acceptance the scheduler has not seen."""


class Gap(NamedTuple):
    row: int  # of the request in the batch
    start: int
    end: int  # the next forward reads from here on


class DraftBacklog:
    """Skipped tokens on the host, by vLLM's index of the request. Blocks are shared by requests and outlive them, so a
    gap is finally a property of the block (`Coverage`); while the batch skips drafting, two numbers per request do.

    The host has only an upper bound of the computed tokens, at most `slack` too high: a gap begins that much early, and
    the tokens there are read again.
    """

    def __init__(self, coverage: Coverage, requests: int, slack: int, limit: int, group: int = 0, loads: bool = False):
        """`coverage`: with all blocks read; `limit`: tokens that the draft can read; `group`: vLLM's cache group of its
        layers; `loads`: a KV connector may bring tokens that the draft has not read."""
        self.coverage, self.slack, self.limit, self.group = coverage, slack, limit, group
        self.loads = loads
        self.blocks: list[list[int]] = [[] for _ in range(requests)]
        self.start = np.zeros(requests, dtype=np.int64)
        self.end = np.zeros(requests, dtype=np.int64)  # skipped from `start` to here, not in `coverage` yet
        self.has_gap = np.zeros(requests, dtype=bool)  # `coverage` has a gap among the computed tokens

    @classmethod
    def of(cls, speculator: Any, kv_cache_config: Any, requests: int) -> "DraftBacklog":
        """Backlog of a `speculator` that `reads_late`, for vLLM's cache and so many requests."""
        group = speculator.group
        size = kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        coverage = Coverage(kv_cache_config.num_blocks, size)
        coverage.renew(slice(None))
        slack = MAX_UNACKED_STEPS * speculator.num_speculative_steps
        loads = speculator.vllm_config.kv_transfer_config is not None
        return cls(coverage, requests, slack, speculator.limit, group, loads)

    def started(self, scheduled: Any, index: Mapping[str, int]) -> None:
        """Note the new requests and the copied blocks of vLLM's SchedulerOutput; `index`: vLLM's, by request."""
        for source, target in scheduled.kv_cache_block_copies or ():
            self.copied(source, target)
        for new in scheduled.scheduled_new_reqs:
            loaded = num_loaded(new) if self.loads else 0
            self.added(index[new.req_id], new.block_ids[self.group], new.num_computed_tokens, loaded)

    def continued(self, running: Any, index: Mapping[str, int]) -> None:
        """Note the new blocks of vLLM's CachedRequestData."""
        for name, blocks in zip(running.req_ids, running.new_block_ids, strict=True):
            if blocks is not None:
                self.extended(index[name], blocks[self.group])

    def added(self, request: int, blocks: list[int], computed: int, loaded: int = 0) -> None:
        """Note a new request with its first `computed` tokens in the cache already, the last of them `loaded`."""
        if computed:
            self.flush(self.end.nonzero()[0])  # they may be in the blocks of others
        self.blocks[request] = list(blocks)
        self.coverage.renew(blocks[-(-computed // self.coverage.block_size) :])
        table = self._table(request)
        self.coverage.skipped(table, computed - loaded, computed)
        self.has_gap[request] = self.coverage.reach(table, computed) < computed

    def copied(self, source: int, target: int) -> None:
        """Note that a block was copied; a request's last tokens in it are new."""
        self.flush(self.end.nonzero()[0])
        self.coverage.filled[target] = self.coverage.filled[source]

    def extended(self, request: int, blocks: list[int]) -> None:
        self.blocks[request] += blocks
        self.coverage.renew(blocks)

    def removed(self, request: int) -> None:
        """Note that a request has left; its blocks stay, or go to others."""
        self.flush(np.array([request]))
        self.blocks[request], self.has_gap[request] = [], False

    def skipped(self, requests: np.ndarray, computed: np.ndarray, scheduled: np.ndarray) -> None:
        """Note a step of `scheduled` tokens after the `computed` ones, all [R], which the draft does not read."""
        start = np.maximum(computed - self.slack, 0)
        again = self.end[requests] > 0
        self.start[requests] = np.where(again, np.minimum(self.start[requests], start), start)
        self.end[requests] = np.maximum(self.end[requests], computed + scheduled)

    def flush(self, requests: np.ndarray) -> None:
        """Write the skipped tokens of these requests to `coverage`."""
        for request in requests[self.end[requests] > 0]:
            table = self._table(request)
            end = min(int(self.end[request]), len(table) * self.coverage.block_size)
            self.coverage.skipped(table, int(self.start[request]), end)
            self.end[request], self.has_gap[request] = 0, True

    def gaps(self, requests: np.ndarray, computed: np.ndarray) -> list[Gap]:
        """Gaps of a batch that the draft has to read before a step after the `computed` tokens [R]."""
        self.flush(requests)
        gaps = []
        for row in self.has_gap[requests].nonzero()[0]:
            end = min(int(computed[row]), self.limit)
            start = self.coverage.reach(self._table(requests[row]), end)
            self.has_gap[requests[row]] = start < end
            if start < end:
                gaps.append(Gap(int(row), start, end))
        return gaps

    def read(self, request: int, start: int, end: int, *, whole: bool) -> None:
        """Note that the draft reads from `start` to `end`; `whole`: that is the whole gap, and the step after it is
        read too."""
        table = self._table(request)
        if whole:
            self.coverage.renew(table[start // self.coverage.block_size :])
            self.has_gap[request] = False
        else:
            self.coverage.read(table, start, end)

    def _table(self, request: int) -> np.ndarray:
        return np.array(self.blocks[request], dtype=np.int64)
