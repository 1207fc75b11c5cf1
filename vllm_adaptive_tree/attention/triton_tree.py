"""Tree attention as Triton kernels, with the contract of `reference.tree_attention`.

A query tile is several rows times the query heads of one KV head. The context is read from the paged cache tile by
tile; of the request's own rows, key tiles without an ancestor of any row of the query tile are skipped by the words of
the tree mask, which in depth-first order is most of a large tree. Own rows are in the cache after their context, or,
while a draft grows its tree, in a buffer beside it. A work list (`plan.AttentionPlan`) written by the device
distributes the tiles and the parts of long contexts to a fixed number of programs, and a second kernel merges the
parts: a CUDA graph may hold the launches, and one compiled variant serves any batch.
"""

# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.attention.launches import Rest
from vllm_adaptive_tree.attention.plan import AttentionPlan
from vllm_adaptive_tree.trees.masks import WORD

LOG2_E = 1.4426950408889634
WIDEN = triton.knobs.runtime.interpret  # Triton's interpreter cannot multiply bfloat16


@triton.jit
def _dot(a, b, WIDEN: tl.constexpr):
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")  # of float32: three products of tensor cores, about its own error


@triton.jit
def _bits_set(words):
    """Number of set bits of int64 words, counted in parallel (Warren, Hacker's Delight, 5-1)."""
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    words += words >> 8
    words += words >> 16
    return ((words + (words >> 32)) & 0x7F).to(tl.int32)


@triton.jit
def _fold(
    peak,  # [M] float32: largest score so far
    total,  # [M] float32: sum of 2 ** (score - peak)
    sums,  # [M, D] float32: that, times the values
    queries,  # [M, D]
    rope_queries,  # [M, EXTRA], if EXTRA
    seen,  # [M or 1, TILE] bool
    keys,  # of the KV head
    values,
    key_at,  # [TILE] int64: offsets
    value_at,
    exists,  # [TILE] bool
    dim,  # [D]
    rope_dim,  # [EXTRA]
    scale,
    value_scale,
    soft_cap,
    HEAD_SIZE: tl.constexpr,
    EXTRA: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add one tile of keys to the online softmax."""
    in_bounds = exists[:, None] & (dim < HEAD_SIZE)[None, :]
    key = tl.load(keys + key_at[:, None] + dim[None, :], mask=in_bounds, other=0.0).to(queries.dtype)
    score = _dot(queries, tl.trans(key), WIDEN)
    if EXTRA:  # latents: the first part of a key is its value
        rope_at = key_at[:, None] + HEAD_SIZE + rope_dim[None, :]
        rope = tl.load(keys + rope_at, mask=exists[:, None], other=0.0).to(queries.dtype)
        score += _dot(rope_queries, tl.trans(rope), WIDEN)
        value = key
    else:
        value = tl.load(values + value_at[:, None] + dim[None, :], mask=in_bounds, other=0.0)
    score *= scale
    if SOFT_CAP:  # tanh x is 1 - 2 / (1 + e ** 2x); scores and cap are times log2(e)
        score = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp2(score * (2.0 * 1.4426950408889634 / soft_cap)))
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
    fade = tl.exp2(peak - base)
    weight = tl.exp2(score - base[:, None])
    total = total * fade + tl.sum(weight, 1)
    if value.dtype != queries.dtype:  # 8 bits
        weight *= value_scale
    sums = sums * fade[:, None] + _dot(weight.to(queries.dtype), value.to(queries.dtype), WIDEN)
    return higher, total, sums


@triton.jit(
    do_not_specialize=["offset", "ancestors_row"],
    do_not_specialize_on_alignment=[
        *("row_start", "context", "ancestors", "work", "items", "merges"),
        *("query_scale", "key_scale", "value_scale"),
    ],
)
def _attend(
    out,  # [rows, H, D], written where a context is not split
    partial,  # [slots, Hkv, LANES, D] float32, written elsewhere
    weight,  # [slots, Hkv, LANES] float32: log2 of the sum of the split's weights
    context_out,  # [rows, H, D]: another kernel's result for the contexts, unless READ_CONTEXT
    context_log,  # [H, rows] float32: its log-sum-exp
    query,  # [rows, H, D + EXTRA]
    key_cache,  # [blocks, BLOCK_SIZE, Hkv, D + EXTRA]
    value_cache,  # [blocks, BLOCK_SIZE, Hkv, D], not read if EXTRA
    own_key,  # [R, S, Hkv, D + EXTRA], if OWN
    own_value,  # [R, S, Hkv, D]
    block_table,  # [R, B]
    row_start,  # [R + 1]
    context,  # [R]
    ancestors,  # [rows, W]
    work,  # [capacity, 3], as the next two `_plan`'s
    items,  # [1]
    merges,  # [rows, 3]
    offset,  # place of each request's first row among its own keys
    scale,  # times log2(e)
    query_scale,  # [1] or [Hkv] float32, if QUERY_8_BITS, as the next two if CACHE_8_BITS
    key_scale,
    value_scale,
    sinks,  # [H], if SINKS
    soft_cap,  # times log2(e), if SOFT_CAP
    context_row,
    context_head,
    context_log_head,
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
    own_request,
    own_slot,
    own_head,
    table_row,
    ancestors_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,  # a power of two
    EXTRA: tl.constexpr,  # if not 0, values are the first HEAD_SIZE of keys that are so much longer; a power of two
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,  # of a query tile: its rows times GROUP, padded to a power of two
    TILE: tl.constexpr,  # keys; divides WORD
    OWN: tl.constexpr,  # True: own rows are in `own_key` and `own_value`, not in the cache
    READ_CONTEXT: tl.constexpr,
    WINDOW: tl.constexpr,  # positions that a row sees, its own included; 0: all
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    QUERY_8_BITS: tl.constexpr,
    CACHE_8_BITS: tl.constexpr,
    SCALE_HEAD: tl.constexpr,  # 1: each KV head has its own scales; 0: one for all
    WORD: tl.constexpr,
    LOG2_E: tl.constexpr,
    WIDEN: tl.constexpr,
):
    TILE_ROWS: tl.constexpr = LANES // GROUP
    EVERY: tl.constexpr = (1 << TILE) - 1 if TILE < WORD else -1
    lane, dim, column = tl.arange(0, LANES), tl.arange(0, PADDED_HEAD), tl.arange(0, TILE)
    rope_dim = tl.arange(0, EXTRA if EXTRA else 1)
    for unit in range(tl.program_id(0), tl.load(items) * KV_HEADS, tl.num_programs(0)):
        item, kv_head = work + unit // KV_HEADS * 3, unit % KV_HEADS
        request, first, split = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        start = tl.load(row_start + request)
        count = tl.load(row_start + request + 1) - start
        slot = tl.load(merges + (start + first) * 3)
        splits = tl.load(merges + (start + first) * 3 + 1)

        # Tiles of the context, then of the own rows up to the last of this tile; each split takes an equal part.
        length = tl.load(context + request)
        own_rows = offset + tl.minimum(first + TILE_ROWS, count)
        context_tiles = (length + TILE - 1) // TILE if READ_CONTEXT else 0
        tiles = context_tiles + (own_rows + TILE - 1) // TILE
        share = (tiles + splits - 1) // splits
        begin = split * share
        end = tl.minimum(begin + share, tiles)

        row = first + lane // GROUP  # in the request
        head = kv_head * GROUP + lane % GROUP
        live = (lane < TILE_ROWS * GROUP) & (row < count)
        flat = (start + row).to(tl.int64)
        written = live[:, None] & (dim < HEAD_SIZE)[None, :]
        query_at = (flat * query_row + head * query_head)[:, None] + dim[None, :]
        queries = tl.load(query + query_at, mask=written, other=0.0).to(out.dtype.element_ty)
        rope_queries = queries
        if EXTRA:
            rope_at = (flat * query_row + head * query_head)[:, None] + HEAD_SIZE + rope_dim[None, :]
            rope_queries = tl.load(query + rope_at, mask=live[:, None], other=0.0).to(out.dtype.element_ty)
        own_scale, key_factor, value_factor = scale, 1.0, 1.0
        if QUERY_8_BITS:
            own_scale = scale * tl.load(query_scale + kv_head * SCALE_HEAD)
        if CACHE_8_BITS:
            key_factor = tl.load(key_scale + kv_head * SCALE_HEAD)
            value_factor = tl.load(value_scale + kv_head * SCALE_HEAD)
        cache_scale = own_scale * key_factor
        table = block_table + request.to(tl.int64) * table_row
        keys, values = key_cache + kv_head * key_head, value_cache + kv_head * value_head
        own_at = request.to(tl.int64) * own_request + kv_head * own_head
        words = ancestors + flat * ancestors_row

        peak = tl.full([LANES], float("-inf"), tl.float32)
        total = tl.zeros([LANES], tl.float32)
        sums = tl.zeros([LANES, PADDED_HEAD], tl.float32)
        if SINKS:  # noqa: SIM102
            if split == 0:
                peak = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * LOG2_E
                total += 1.0
        if READ_CONTEXT:
            first_step = begin
            if WINDOW:  # by position, not by place in the tree
                left = tl.zeros([LANES], tl.int32) + (length - WINDOW)  # first position in each row's window
                for word in range((own_rows + WORD - 1) // WORD):
                    left += _bits_set(tl.load(words + word, mask=live, other=0))
                lowest = tl.maximum(tl.min(tl.where(live, left, length), 0), 0)  # blocks before it may be another's
                first_step = tl.maximum(begin, lowest // TILE)
            for step in range(first_step, tl.minimum(end, context_tiles)):
                position = step * TILE + column
                exists = position < length
                seen = exists[None, :]
                if WINDOW:
                    exists = exists & (position >= lowest)
                    seen = exists[None, :] & (position[None, :] >= left[:, None])
                block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
                key_at = block * key_block + position % BLOCK_SIZE * key_slot
                value_at = block * value_block + position % BLOCK_SIZE * value_slot
                peak, total, sums = _fold(
                    peak, total, sums, queries, rope_queries, seen, keys, values, key_at, value_at, exists,
                    dim, rope_dim, cache_scale, value_factor, soft_cap, HEAD_SIZE, EXTRA, SOFT_CAP, WIDEN,
                )  # fmt: skip
        elif (split == 0) & (length > 0):
            log = tl.load(context_log + head * context_log_head + flat, mask=live, other=float("-inf"))
            peak = log * LOG2_E
            total = tl.where(live, 1.0, 0.0)
            context_at = (flat * context_row + head * context_head)[:, None] + dim[None, :]
            sums = tl.load(context_out + context_at, mask=written, other=0.0).to(tl.float32)
        for step in range(tl.maximum(begin - context_tiles, 0), end - context_tiles):
            place = step * TILE + column
            bits = (tl.load(words + step * TILE // WORD, mask=live, other=0) >> (step * TILE % WORD)) & EVERY
            if tl.max((bits != 0).to(tl.int32), 0) != 0:
                exists = place < offset + count
                seen = ((bits[:, None] >> column[None, :]) & 1) != 0
                if OWN:
                    key_at = own_at + place * own_slot
                    peak, total, sums = _fold(
                        peak, total, sums, queries, rope_queries, seen, own_key, own_value, key_at, key_at, exists,
                        dim, rope_dim, own_scale, 1.0, soft_cap, HEAD_SIZE, EXTRA, SOFT_CAP, WIDEN,
                    )  # fmt: skip
                else:
                    position = length + place
                    block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
                    key_at = block * key_block + position % BLOCK_SIZE * key_slot
                    value_at = block * value_block + position % BLOCK_SIZE * value_slot
                    peak, total, sums = _fold(
                        peak, total, sums, queries, rope_queries, seen, keys, values, key_at, value_at, exists,
                        dim, rope_dim, cache_scale, value_factor, soft_cap, HEAD_SIZE, EXTRA, SOFT_CAP, WIDEN,
                    )  # fmt: skip

        norm = tl.where(total > 0, total, 1.0)
        result = sums / norm[:, None]
        if splits == 1:
            out_at = (flat * out_row + head * out_head)[:, None] + dim[None, :]
            tl.store(out + out_at, result.to(out.dtype.element_ty), mask=written)
        else:
            partial_at = ((slot + split) * KV_HEADS + kv_head).to(tl.int64) * LANES + lane
            tl.store(weight + partial_at, peak + tl.log2(norm), mask=live)
            tl.store(partial + partial_at[:, None] * HEAD_SIZE + dim[None, :], result, mask=written)


@triton.jit(do_not_specialize_on_alignment=["merges"])
def _merge(
    out,  # [rows, H, D]
    partial,  # [slots, Hkv, LANES, D]
    weight,  # [slots, Hkv, LANES]
    merges,  # [rows, 3]: as `_plan` writes it
    out_row,
    out_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,  # read at once
):
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, splits, place = tl.load(merges + row * 3), tl.load(merges + row * 3 + 1), tl.load(merges + row * 3 + 2)
    if splits < 2:
        return
    split, dim = tl.arange(0, SPLITS), tl.arange(0, PADDED_HEAD)
    for head in range(GROUP):
        lane = place * GROUP + head
        peak = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        sums = tl.zeros([PADDED_HEAD], tl.float32)
        for begin in range(0, splits, SPLITS):
            exists = begin + split < splits
            at = ((slot + begin + split) * KV_HEADS + kv_head).to(tl.int64) * LANES + lane
            log = tl.load(weight + at, mask=exists, other=float("-inf"))
            in_bounds = exists[:, None] & (dim < HEAD_SIZE)[None, :]
            parts = tl.load(partial + at[:, None] * HEAD_SIZE + dim[None, :], mask=in_bounds, other=0.0)
            higher = tl.maximum(peak, tl.max(log, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade, share = tl.exp2(peak - base), tl.exp2(log - base)
            total = total * fade + tl.sum(share, 0)
            sums = sums * fade + tl.sum(parts * share[:, None], 0)
            peak = higher
        result = sums / tl.where(total > 0, total, 1.0)
        out_at = row * out_row + (kv_head * GROUP + head) * out_head + dim
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=dim < HEAD_SIZE)


class OwnKeys(NamedTuple):
    """K/V of the requests' own rows beside the cache, in the dtype of the queries: while a draft grows its trees."""

    key: Tensor  # [R, S, Hkv, D], any strides but 1 in the last dimension
    value: Tensor  # the same strides
    offset: int
    """Slot of the first row of each request: a level of W rows sees, by its bits, the slots 0 .. offset + W - 1."""


class Scales(NamedTuple):
    """Factors of queries and of a cache of 8 bits, in its device's memory: float32, one for all KV heads, or [Hkv]."""

    query: Tensor
    key: Tensor
    value: Tensor


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
    plan: AttentionPlan | None = None,
    own: OwnKeys | None = None,
    scales: Scales | None = None,
    context_result: tuple[Tensor, Tensor] | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend like `reference.tree_attention`, accumulating in float32, without a host sync. A row that sees no key
    yields 0.

    Args:
        query, out: bfloat16, float16 or float32; the query also of 8 bits, with a cache of 8 bits.
            A query may be longer than a value, as latents have it: then `value_cache` is the first part of
            `key_cache`, of the same memory, and so are those of `own`; the KV heads, too, may be the same memory.
        key_cache, value_cache: of the dtype of `out`, or of 8 bits (float8_e4m3fn, from sm_89 on).
        plan: `AttentionPlan.update`d with `row_start` and `context`; None: makes one, for this call alone.
        own: the rows' own K/V; None: it is in the cache, after the context.
        scales: of what has 8 bits; None: all are 1.
        context_result: another kernel's attention over the contexts, [rows, H, D], and its log-sum-exp, [H, rows]
            float32; then only the requests' own rows are read here. Not with a `plan`, nor with what follows.
        window: as in the reference, and longer than a tree is deep: all ancestors are inside it.
        soft_cap, sinks: as in the reference.
    """
    rows, heads, head_size = out.shape
    _, block_size, kv_heads, _ = key_cache.shape
    requests, extra = context.shape[0], query.shape[2] - head_size
    assert key_cache.shape[:3] == value_cache.shape[:3]
    assert key_cache.shape[3] == query.shape[2]
    assert query.shape[:2] == out.shape[:2]
    assert not extra or key_cache.data_ptr() == value_cache.data_ptr(), "values are the first part of longer keys"
    assert row_start.shape[0] == requests + 1
    assert ancestors.shape[0] >= rows
    assert row_start.is_contiguous()
    assert context.is_contiguous()
    if rows == 0 or requests == 0:
        return out

    if plan is None:
        plan = AttentionPlan(rows, requests, heads, kv_heads, head_size, out.dtype, query.device)
        plan.update(row_start, context if context_result is None else torch.zeros_like(context))
    assert len(plan.merges) >= rows
    own_key, own_value, offset = (key_cache, value_cache, 0) if own is None else own
    bits_8 = query.dtype.itemsize == 1 and scales is not None, key_cache.dtype.itemsize == 1 and scales is not None
    factors = (plan.weight,) * 3 if scales is None else scales
    context_out, context_log = (out, plan.weight) if context_result is None else context_result
    tensors = query, out, key_cache, value_cache, own_key, block_table, ancestors, context_out, context_log
    key = (
        *(tensor.stride() for tensor in tensors),
        *(query.dtype, out.dtype, key_cache.dtype, None if sinks is None else sinks.dtype),
        *(heads, head_size, extra, block_size, kv_heads, window, soft_cap != 0, own is None, context_result is None),
        *(*bits_8, factors[0].numel() > 1),
    )
    shape = {
        "KV_HEADS": kv_heads,
        "GROUP": plan.group,
        "HEAD_SIZE": head_size,
        "PADDED_HEAD": plan.padded_head,
    }

    def rest() -> Rest:
        assert heads % kv_heads == 0
        assert ancestors.dtype == torch.int64
        assert all(tensor.stride(-1) == 1 for tensor in (query, key_cache, value_cache, block_table, ancestors, out))
        assert plan.partial.shape[1:] == (kv_heads, plan.lanes, head_size)
        assert own_key.stride() == own_value.stride() or own is None
        assert context_result is None or not (window or soft_cap or sinks is not None)
        strides = (
            *(*context_out.stride()[:2], context_log.stride(0), *out.stride()[:2], *query.stride()[:2]),
            *(*key_cache.stride()[:3], *value_cache.stride()[:3], *own_key.stride()[:3]),
            *(block_table.stride(0), ancestors.stride(0)),
        )
        constants = {
            **shape,
            "EXTRA": extra,
            "BLOCK_SIZE": block_size,
            "LANES": plan.lanes,
            "TILE": plan.tile,
            "OWN": own is not None,
            "READ_CONTEXT": context_result is None,
            "WINDOW": window,
            "SOFT_CAP": soft_cap != 0,
            "SINKS": sinks is not None,
            "QUERY_8_BITS": bits_8[0],
            "CACHE_8_BITS": bits_8[1],
            "SCALE_HEAD": int(scales is not None and scales.key.numel() > 1),
            "WORD": WORD,
            "LOG2_E": LOG2_E,
            "WIDEN": WIDEN,
        }
        return Rest(strides, constants, {"num_warps": plan.warps, "num_stages": 3})

    sink_of = plan.weight if sinks is None else sinks
    plan.launches(
        _attend,
        ("attend", *key),
        (plan.programs, 1, 1),
        (
            *(out, plan.partial, plan.weight, context_out, context_log),
            *(query, key_cache, value_cache, own_key, own_value, block_table, row_start, context, ancestors),
            *(plan.work, plan.items, plan.merges, offset, scale * LOG2_E, *factors),
            *(sink_of, soft_cap * LOG2_E),
        ),
        (out, query, key_cache, value_cache, own_key, own_value, block_table, context_out, context_log, sink_of),
        rest,
    )
    plan.launches(
        _merge,
        ("merge", *key),
        (rows, kv_heads, 1),
        (out, plan.partial, plan.weight, plan.merges),
        (out,),
        lambda: Rest(out.stride()[:2], {**shape, "LANES": plan.lanes, "SPLITS": 8}, {"num_warps": 4}),
    )
    return out
