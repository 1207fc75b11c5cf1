"""Copies of the accepted path's K/V to its final slots, all layers of a cache group in one launch, byte by byte."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["levels"], do_not_specialize_on_alignment=["block_table", "root", "nodes"])
def _move(
    caches,  # [layers]: addresses of [blocks, Hkv, BLOCK_SIZE, WIDTH] int64
    block_table,  # [R, B]
    root,  # [R]
    nodes,  # [R, levels]: the accepted nodes, -1 pads
    levels,
    table_row,
    cache_block,
    cache_head,
    cache_slot,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # of a slot
    PADDED_WIDTH: tl.constexpr,  # a power of two, as the next
    PADDED_LEVELS: tl.constexpr,
):
    request, layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    level, column = tl.arange(0, PADDED_LEVELS), tl.arange(0, PADDED_WIDTH)
    node = tl.load(nodes + request * levels + level, mask=level < levels, other=-1).to(tl.int64)
    moves = (node >= 0) & (node != level)  # the first nodes of a chain are in their final slots
    if tl.max(moves.to(tl.int32), 0) == 0:
        return
    first = tl.load(root + request).to(tl.int64) + 1
    table = block_table + request * table_row
    cache = tl.load(caches + layer).to(tl.pointer_type(tl.int64)) + head.to(tl.int64) * cache_head
    old, new = first + node, first + level
    old_block = tl.load(table + old // BLOCK_SIZE, mask=moves, other=0).to(tl.int64)
    new_block = tl.load(table + new // BLOCK_SIZE, mask=moves, other=0).to(tl.int64)
    source = old_block * cache_block + old % BLOCK_SIZE * cache_slot
    target = new_block * cache_block + new % BLOCK_SIZE * cache_slot
    in_bounds = moves[:, None] & (column < WIDTH)[None, :]
    rows = tl.load(cache + source[:, None] + column[None, :], mask=in_bounds, other=0)
    tl.debug_barrier()  # a slot may be read for one level and written for another
    tl.store(cache + target[:, None] + column[None, :], rows, mask=in_bounds)


def layer_addresses(caches: Sequence[Tensor]) -> Tensor:
    """Addresses [layers] int64 for `move_accepted`; made once, after the caches, which have one shape and strides."""
    assert all(cache.shape == caches[0].shape and cache.stride() == caches[0].stride() for cache in caches)
    return torch.tensor([cache.data_ptr() for cache in caches], device=caches[0].device)


def move_accepted(addresses: Tensor, cache: Tensor, block_table: Tensor, root: Tensor, nodes: Tensor) -> None:
    """Move the K/V of every request's accepted path to the slots after its root, in place.

    Row i of a request's tree is in the slot of position root + 1 + i, and the node accepted at level l goes to
    position root + 1 + l, which is never after it.

    Args:
        addresses: [layers], `layer_addresses` of a cache group's layers.
        cache: one of their caches, [blocks, Hkv, block_size, 2 * D] of any dtype, a slot a multiple of 8 bytes.
        block_table: [R or more, B] int32.
        root: [R] positions of the roots.
        nodes: [R, L] int64, the nodes accepted at levels 0 to L - 1, increasing; -1 pads.
    """
    words = cache.view(torch.int64)
    requests, levels = nodes.shape
    _, heads, block_size, width = words.shape
    if requests and levels:
        _move[(requests, len(addresses), heads)](
            *(addresses, block_table, root.contiguous(), nodes.contiguous(), levels),
            *(block_table.stride(0), *words.stride()[:3]),
            BLOCK_SIZE=block_size,
            WIDTH=width,
            PADDED_WIDTH=triton.next_power_of_2(width),
            PADDED_LEVELS=triton.next_power_of_2(levels),
            num_warps=4,
        )
