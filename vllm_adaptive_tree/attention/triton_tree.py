"""Tree attention over a paged cache as Triton kernels, with the contract of `reference.tree_attention`.

A query tile is several rows times the query heads of one KV head. The context is read tile by tile; of the request's
own rows, key tiles without an ancestor of any row of the query tile are skipped by the words of the tree mask, which in
depth-first order is most of a large tree. A long context is split, and a second kernel merges the splits; the context
part may also come from another kernel that returns its log-sum-exp. Grids and splits depend on shapes only, so the
kernels can be captured in a CUDA graph.
"""

# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.trees.masks import WORD

LOG2_E = 1.4426950408889634
MOST_SPLITS = 64
TILES_PER_SPLIT = 4  # fewer are not worth merging
WIDEN = triton.knobs.runtime.interpret  # Triton's interpreter cannot multiply bfloat16


@triton.jit
def _dot(a, b, WIDEN: tl.constexpr):
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _fold(
    peak,  # [M] float32: largest score so far
    total,  # [M] float32: sum of 2 ** (score - peak)
    sums,  # [M, D] float32: that, times the values
    queries,  # [M, D]
    seen,  # [M or 1, TILE] bool
    position,  # [TILE] in the request
    exists,  # [TILE] bool
    dim,  # [D]
    table,  # the request's row of the block table
    keys,  # the KV head of block 0, slot 0
    values,
    key_block,
    key_slot,
    value_block,
    value_slot,
    scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add one tile of keys to the online softmax."""
    block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    slot = position % BLOCK_SIZE
    in_bounds = exists[:, None] & (dim < HEAD_SIZE)[None, :]
    key = tl.load(keys + (block * key_block + slot * key_slot)[:, None] + dim[None, :], mask=in_bounds, other=0.0)
    value = tl.load(
        values + (block * value_block + slot * value_slot)[:, None] + dim[None, :], mask=in_bounds, other=0.0
    )
    score = tl.where(seen, _dot(queries, tl.trans(key), WIDEN) * scale, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
    fade = tl.exp2(peak - base)
    weight = tl.exp2(score - base[:, None])
    total = total * fade + tl.sum(weight, 1)
    sums = sums * fade[:, None] + _dot(weight.to(value.dtype), value, WIDEN)
    return higher, total, sums


@triton.jit
def _attend(
    out,  # [rows, H, D], written if PARTS is 1
    partial,  # [PARTS, rows, H, D] float32, otherwise
    weight,  # [PARTS, rows, H] float32: log2 of the sum of the split's weights, -inf: partial is not written
    query,  # [rows, H, D]
    key_cache,  # [blocks, BLOCK_SIZE, Hkv, D]
    value_cache,  # [blocks, BLOCK_SIZE, Hkv, D]
    block_table,  # [R, B]
    row_start,  # [R + 1]
    context,  # [R]
    ancestors,  # [rows, W]
    requests,
    rows,
    scale,  # times log2(e)
    out_row,
    out_head,
    query_row,
    query_head,
    key_block,
    key_slot,
    key_head,
    value_block,
    value_slot,
    value_head,
    table_row,
    ancestors_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,  # a power of two
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,  # of a query tile: its rows times GROUP, padded to a power of two
    TILE: tl.constexpr,  # keys; divides WORD
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,  # the splits, plus one if the context result is given
    READ_CONTEXT: tl.constexpr,  # 0 or 1
    PADDED_REQUESTS: tl.constexpr,  # a power of two
    WORD: tl.constexpr,
    WIDEN: tl.constexpr,
):
    TILE_ROWS: tl.constexpr = LANES // GROUP
    EVERY: tl.constexpr = (1 << TILE) - 1 if TILE < WORD else -1
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)

    # Request r has the tiles from row_start[r] // TILE_ROWS + r on: enough for its rows, wherever they start.
    index = tl.arange(0, PADDED_REQUESTS)
    begins = tl.load(row_start + index, mask=index < requests, other=1 << 30) // TILE_ROWS + index
    request = tl.sum((begins <= tile).to(tl.int32), 0) - 1
    start = tl.load(row_start + request)
    count = tl.load(row_start + request + 1) - start
    first = (tile - start // TILE_ROWS - request) * TILE_ROWS
    if first >= count:
        return

    # Tiles of the context, then of the request's own rows up to the last of this tile; each split takes an equal part.
    length = tl.load(context + request)
    own_rows = tl.minimum(first + TILE_ROWS, count)
    context_tiles = (length + TILE - 1) // TILE * READ_CONTEXT
    tiles = context_tiles + (own_rows + TILE - 1) // TILE
    share = (tiles + SPLITS - 1) // SPLITS
    begin = split * share
    end = tl.minimum(begin + share, tiles)

    lane = tl.arange(0, LANES)
    row = first + lane // GROUP  # in the request
    head = kv_head * GROUP + lane % GROUP
    live = (lane < TILE_ROWS * GROUP) & (row < count)
    flat = (start + row).to(tl.int64)
    dim = tl.arange(0, PADDED_HEAD)
    written = live[:, None] & (dim < HEAD_SIZE)[None, :]
    at = (flat * query_row + head * query_head)[:, None] + dim[None, :]
    queries = tl.load(query + at, mask=written, other=0.0)
    table = block_table + request.to(tl.int64) * table_row
    keys, values = key_cache + kv_head * key_head, value_cache + kv_head * value_head
    words = ancestors + flat * ancestors_row
    column = tl.arange(0, TILE)

    peak = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    sums = tl.zeros([LANES, PADDED_HEAD], tl.float32)
    for step in range(begin, tl.minimum(end, context_tiles)):
        position = step * TILE + column
        exists = position < length
        peak, total, sums = _fold(
            peak, total, sums, queries, exists[None, :], position, exists, dim, table, keys,
            values, key_block, key_slot, value_block, value_slot, scale, BLOCK_SIZE, HEAD_SIZE, WIDEN,
        )  # fmt: skip
    for step in range(tl.maximum(begin - context_tiles, 0), end - context_tiles):
        offset = step * TILE
        bits = (tl.load(words + offset // WORD, mask=live, other=0) >> (offset % WORD)) & EVERY
        if tl.max((bits != 0).to(tl.int32), 0) != 0:
            position = length + offset + column
            exists = offset + column < count
            seen = ((bits[:, None] >> column[None, :]) & 1) != 0
            peak, total, sums = _fold(
                peak, total, sums, queries, seen, position, exists, dim, table, keys, values,
                key_block, key_slot, value_block, value_slot, scale, BLOCK_SIZE, HEAD_SIZE, WIDEN,
            )  # fmt: skip

    norm = tl.where(total > 0, total, 1.0)
    result = sums / norm[:, None]
    if PARTS == 1:
        at = (flat * out_row + head * out_head)[:, None] + dim[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=written)
    else:
        place = (split * rows + flat) * HEADS + head
        tl.store(weight + place, peak + tl.log2(norm), mask=live)
        if begin < end:
            tl.store(partial + place[:, None] * HEAD_SIZE + dim[None, :], result, mask=written)


@triton.jit
def _merge(
    out,  # [rows, H, D]
    partial,  # [SPLITS, rows, H, D]
    weight,  # [SPLITS, rows, H]
    row_start,  # [R + 1]
    requests,
    rows,
    out_row,
    out_head,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(row_start + requests):
        return
    split, dim = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED_HEAD)
    place = (split.to(tl.int64) * rows + row) * HEADS + head
    log = tl.load(weight + place, mask=split < SPLITS, other=float("-inf"))
    peak = tl.max(log, 0)
    share = tl.exp2(log - tl.where(peak == float("-inf"), 0.0, peak))
    in_bounds = (share > 0)[:, None] & (dim < HEAD_SIZE)[None, :]
    parts = tl.load(partial + place[:, None] * HEAD_SIZE + dim[None, :], mask=in_bounds, other=0.0)
    total = tl.sum(share, 0)
    result = tl.sum(parts * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    at = row.to(tl.int64) * out_row + head * out_head + dim
    tl.store(out + at, result.to(out.dtype.element_ty), mask=dim < HEAD_SIZE)


class Tiling(NamedTuple):
    """How the work is divided, from shapes only."""

    lanes: int  # of a query tile
    tile: int  # keys
    query_tiles: int
    splits: int

    @classmethod
    def of(cls, query: Tensor, kv_heads: int, requests: int, longest: int, processors: int) -> "Tiling":
        """`longest`: upper bound of a request's positions; `processors`: multiprocessors of the device."""
        rows, heads, head_size = query.shape
        group = heads // kv_heads
        row_bytes = triton.next_power_of_2(head_size) * query.element_size()
        mean = triton.cdiv(rows, requests) * group
        widest = min(max(32_768 // row_bytes, 16), 128)
        lanes = max(min(triton.next_power_of_2(mean), widest), triton.next_power_of_2(group), 16)
        tile = min(max(16_384 // row_bytes, 16), WORD)
        tile_rows = lanes // group
        programs = max(triton.cdiv(rows, tile_rows), requests) * kv_heads
        splits = min(processors // programs, triton.cdiv(longest, TILES_PER_SPLIT * tile), MOST_SPLITS)
        return cls(lanes, tile, rows // tile_rows + requests, max(splits, 1))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    row_start: Tensor,
    context: Tensor,
    ancestors: Tensor,
    scale: float,
    out: Tensor,
    *,
    splits: int | None = None,
    context_result: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Like `reference.tree_attention`, accumulating in float32, without a host sync. A row that sees no key yields 0.

    Args:
        query, key_cache, value_cache, out: bfloat16, float16 or float32.
        splits: parts of a context processed in parallel; None: enough to fill the device.
        context_result: another kernel's attention over the contexts, [rows, H, D], and its log-sum-exp, [H, rows]
            float32; then only the requests' own rows are read here.
    """
    rows, heads, head_size = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    requests = context.shape[0]
    assert heads % kv_heads == 0
    assert key_cache.shape == value_cache.shape
    assert query.shape == out.shape
    assert row_start.shape[0] == requests + 1
    assert ancestors.shape[0] == rows
    assert ancestors.dtype == torch.int64
    assert all(tensor.stride(-1) == 1 for tensor in (query, key_cache, value_cache, block_table, ancestors, out))
    assert row_start.is_contiguous()
    assert context.is_contiguous()
    if rows == 0 or requests == 0:
        return out

    longest = block_table.shape[1] * block_size if context_result is None else 1
    tiling = Tiling.of(query, kv_heads, requests, longest, _processors(query.device))
    splits = tiling.splits if splits is None else splits
    parts = splits + (context_result is not None)
    padded_head = triton.next_power_of_2(head_size)
    partial = weight = out  # not touched without a merge
    if parts > 1:
        partial = query.new_empty((parts, rows, heads, head_size), dtype=torch.float32)
        weight = query.new_empty((parts, rows, heads), dtype=torch.float32)
    if context_result is not None:
        partial[splits] = context_result[0]
        torch.mul(context_result[1].t(), LOG2_E, out=weight[splits])
    _attend[(tiling.query_tiles, kv_heads, splits)](
        *(out, partial, weight, query, key_cache, value_cache, block_table, row_start, context, ancestors),
        *(requests, rows, scale * LOG2_E, *out.stride()[:2], *query.stride()[:2]),
        *(*key_cache.stride()[:3], *value_cache.stride()[:3], block_table.stride(0), ancestors.stride(0)),
        HEADS=heads,
        GROUP=heads // kv_heads,
        HEAD_SIZE=head_size,
        PADDED_HEAD=padded_head,
        BLOCK_SIZE=block_size,
        LANES=tiling.lanes,
        TILE=tiling.tile,
        SPLITS=splits,
        PARTS=parts,
        READ_CONTEXT=int(context_result is None),
        PADDED_REQUESTS=triton.next_power_of_2(requests),
        WORD=WORD,
        WIDEN=WIDEN,
        num_warps=8 if tiling.lanes > 64 else 4,
        num_stages=3,
    )
    if parts > 1:
        _merge[(rows, heads)](
            *(out, partial, weight, row_start, requests, rows, *out.stride()[:2]),
            HEADS=heads,
            HEAD_SIZE=head_size,
            PADDED_HEAD=padded_head,
            SPLITS=parts,
            PADDED_SPLITS=triton.next_power_of_2(parts),
            num_warps=4,
        )
    return out
