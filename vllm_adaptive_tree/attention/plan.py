"""Work list of tree attention, written by the device from lengths that the host does not know."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from functools import cache
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.attention.launches import Launches, Rest
from vllm_adaptive_tree.trees.masks import WORD

LANES = (16, 64, 128)
"""Sizes of a query tile, each a compiled variant of the kernel."""
MOST_SPLITS = 64
TILES_PER_SPLIT = 2
"""Least tiles of keys per split: a program writes as many bytes of a partial result as two tiles have. A single request
of 600 tokens and 8 KV heads then has 40 programs."""


@triton.jit(do_not_specialize=["requests", "rows", "slots", "least"], do_not_specialize_on_alignment=["row_start"])
def _plan(
    work,  # [capacity, 3]: request, first row in the request, split
    items,  # [1]: entries of `work`
    merges,  # [rows, 3]: of a row's tile the slot of the first partial result and the number of splits; place in it
    row_start,  # [R + 1]
    context,  # [R]
    requests,
    rows,
    slots,  # at most so many partial results for a KV head
    least,  # tiles of keys for a split
    TILE_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    PADDED_REQUESTS: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
):
    """One program per request, which computes the shares of all and writes its own."""
    index = tl.arange(0, PADDED_REQUESTS)
    exists = index < requests
    start = tl.load(row_start + index, mask=exists, other=0)
    count = tl.load(row_start + index + 1, mask=exists, other=0) - start
    tiles = (count + TILE_ROWS - 1) // TILE_ROWS
    keys = (tl.load(context + index, mask=exists, other=0) + TILE - 1) // TILE + (count + TILE - 1) // TILE
    total = tl.sum(tiles.to(tl.int64) * keys, 0)
    share = tl.maximum((total + slots - 1) // slots, least)
    splits = tl.minimum(tl.maximum(keys // share, 1), MOST_SPLITS).to(tl.int32)
    made = tiles * splits
    longest = (keys + splits - 1) // splits
    merged = tl.where(splits > 1, made, 0)  # in all at most total // share, which is at most `slots`

    request = tl.program_id(0)
    here = index == request
    own_start, own_count = tl.sum(tl.where(here, start, 0), 0), tl.sum(tl.where(here, count, 0), 0)
    own_tiles, own_splits = tl.sum(tl.where(here, tiles, 0), 0), tl.sum(tl.where(here, splits, 0), 0)
    own_longest = tl.sum(tl.where(here, longest, 0), 0)
    earlier = (longest > own_longest) | ((longest == own_longest) & (index < request))  # long parts are dealt out first
    item = tl.sum(tl.where(earlier, made, 0), 0)
    slot = tl.sum(tl.where(index < request, merged, 0), 0)
    own = tl.arange(0, BLOCK)
    for begin in range(0, own_tiles * own_splits, BLOCK):
        entry = begin + own
        inside = entry < own_tiles * own_splits
        at = work + (item + entry) * 3
        tl.store(at, request, mask=inside)
        tl.store(at + 1, entry % own_tiles * TILE_ROWS, mask=inside)
        tl.store(at + 2, entry // own_tiles, mask=inside)
    for begin in range(0, own_count, BLOCK):
        row = begin + own
        at = merges + (own_start + row) * 3
        tl.store(at, slot + row // TILE_ROWS * own_splits, mask=row < own_count)
        tl.store(at + 1, own_splits, mask=row < own_count)
        tl.store(at + 2, row % TILE_ROWS, mask=row < own_count)
    if request == requests - 1:
        tl.store(items, tl.sum(made, 0))
        for begin in range(own_start + own_count, rows, BLOCK):
            row = begin + own
            tl.store(merges + row * 3 + 1, 0, mask=row < rows)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Tiling(NamedTuple):
    """Sizes of the tiles of queries and keys, by the shapes of a model and the usual number of rows of a request."""

    lanes: int  # of a query tile: rows times the query heads of a KV head, padded to a power of two
    tile: int  # keys
    warps: int

    @classmethod
    def of(cls, group: int, head_size: int, element_size: int, rows_per_request: int) -> "Tiling":
        """`group`: query heads of a KV head; `element_size` in bytes. Sizes compile with few or no spills."""
        padded_head = triton.next_power_of_2(head_size)
        full = element_size > 2  # float32 is multiplied in three parts
        widest = min(max((16_384 if full else 32_768) // (padded_head * element_size), 16), LANES[-1])
        lanes = next((lanes for lanes in LANES if lanes >= rows_per_request * group), LANES[-1])
        lanes = max(min(lanes, widest), triton.next_power_of_2(group))
        tile = min(max(16_384 // (padded_head * element_size), 16), WORD // 2 if full else WORD)
        return cls(lanes, tile, 8 if lanes * padded_head >= 8192 else 4)


class AttentionPlan:
    """Work list and partial results of tree attention, in persistent buffers.

    `update` fills it once for all layers and, in drafting, for all levels of a step: one launch that reads no value on
    the host, so that a CUDA graph may hold it. The split of a context follows its length on the device, not the shapes.
    Layers that run one after the other share a plan.
    """

    def __init__(
        self,
        rows: int,
        requests: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rows_per_request: int | None = None,
        processors: int | None = None,
        tiles_per_split: int = TILES_PER_SPLIT,
    ):
        """
        Args:
            rows, requests: upper bounds. The kernel `_plan` is compiled once per power of two of `requests`.
            heads, kv_heads, head_size, dtype: of the queries and the cache; with `rows_per_request` they determine the
                tiles.
            rows_per_request: usual rows of a request, e.g. 1 + N in verification, W in drafting; None: the mean.
            processors: multiprocessors to fill; None: the device's.
            tiles_per_split: least length of a context's split, in tiles of keys.
        """
        self.group, self.kv_heads = heads // kv_heads, kv_heads
        self.padded_head = triton.next_power_of_2(head_size)
        self.launches = Launches()
        usual = triton.cdiv(rows, requests) if rows_per_request is None else rows_per_request
        self.lanes, self.tile, self.warps = Tiling.of(self.group, head_size, dtype.itemsize, usual)
        processors = _processors(device) if processors is None else processors
        resident = processors * (8 // self.warps)  # programs that run side by side: each takes most of its registers
        self.slots, self.least = max(resident // kv_heads, 1), tiles_per_split
        self.padded_requests = triton.next_power_of_2(requests)
        capacity = rows // self.tile_rows + requests + self.slots
        self.programs = min(2 * processors, capacity * kv_heads)
        self.work = torch.zeros(capacity, 3, dtype=torch.int32, device=device)
        self.items = torch.zeros(1, dtype=torch.int32, device=device)
        self.merges = torch.zeros(rows, 3, dtype=torch.int32, device=device)
        partial = (self.slots, kv_heads, self.lanes)
        self.partial = torch.empty(*partial, head_size, dtype=torch.float32, device=device)
        self.weight = torch.empty(partial, dtype=torch.float32, device=device)

    @property
    def tile_rows(self) -> int:
        return self.lanes // self.group

    def update(self, row_start: Tensor, context: Tensor) -> Self:
        """
        Args:
            row_start: [R + 1] int32, first row of each request.
            context: [R] int32, tokens of each before its rows.
        """
        requests = len(context)
        assert len(row_start) == requests + 1
        assert row_start.is_contiguous()
        assert context.is_contiguous()
        assert 0 < requests <= self.padded_requests
        self.launches(
            _plan,
            "plan",
            (requests, 1, 1),
            (
                *(self.work, self.items, self.merges, row_start, context),
                *(requests, len(self.merges), self.slots, self.least),
            ),
            (context,),
            self._rest,
        )
        return self

    def _rest(self) -> Rest:
        constants = {
            "TILE_ROWS": self.tile_rows,
            "TILE": self.tile,
            "MOST_SPLITS": MOST_SPLITS,
            "PADDED_REQUESTS": self.padded_requests,
            "BLOCK": 128,
        }
        return Rest((), constants, {"num_warps": 4})
