"""Children of a level of a fixed shape, put into their trees in one launch."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.proposers.static_tree import ShapeGrowth
from vllm_adaptive_tree.trees.tree_batch import EMPTY


@triton.jit
def _exists(tokens, dead, at, column, width, going, FIRST: tl.constexpr, EMPTY: tl.constexpr):
    """Nodes whose children are drawn: those that are there, in a row that is not dead of a tree that goes on."""
    read = (column < width) & (going != 0)
    alive = read & (tl.load(dead + column, mask=read, other=1) == 0)
    return alive & (FIRST | (tl.load(tokens + at, mask=alive, other=EMPTY) != EMPTY))


@triton.jit(do_not_specialize=["slots", "inner_count", "count", "width", "ranks", "first"])
def _place(
    tokens,  # [R, 1 + N], in place, as the next two
    path,
    read,
    exists_out,  # [R, W] bool
    drawn,  # [R, W, K]
    q,  # [R, W, V]
    dead,  # [R, W] bool
    going,  # [R] bool
    inner,  # [I] slots of the nodes above
    children,  # [C] slots
    column,  # [C] of the nodes above
    rank,  # [C]
    slots,  # 1 + N
    inner_count,
    count,
    width,  # W
    ranks,  # K
    first,
    vocabulary,
    FIRST: tl.constexpr,
    EMPTY: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two
):
    request, lane = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    tokens += request * slots
    path += request * slots
    read += request * slots
    dead += request * width
    goes = tl.load(going + request).to(tl.int32)

    is_child = lane < count
    above = tl.load(column + lane, mask=is_child, other=0)
    at = tl.load(inner + above, mask=is_child, other=0)
    exists = _exists(tokens, dead, at, tl.where(is_child, above, width), width, goes, FIRST, EMPTY)
    place, row = tl.load(rank + lane, mask=is_child, other=0), request * width + above
    token = tl.load(drawn + row * ranks + place, mask=exists & (place < ranks), other=EMPTY)
    in_width = is_child & (above < width)
    chance = tl.load(q + row * vocabulary + tl.maximum(token, 0), mask=in_width, other=1.0)
    through = tl.log(chance) + tl.load(path + at, mask=in_width, other=0.0)
    to = tl.load(children + lane, mask=is_child, other=0)
    tl.store(tokens + to, token, mask=is_child)
    tl.store(path + to, through, mask=is_child)

    is_inner = (lane < inner_count) & (lane < width)
    at = tl.load(inner + lane, mask=is_inner, other=0)
    exists = _exists(tokens, dead, at, tl.where(is_inner, lane, width), width, goes, FIRST, EMPTY)
    tl.store(read + at, tl.where(exists, first + lane, -1).to(tl.int64), mask=is_inner)
    tl.store(exists_out + request * width + lane, exists, mask=is_inner)


def place_children(growth: ShapeGrowth, drawn: Tensor, q: Tensor, dead: Tensor) -> tuple[ShapeGrowth, Tensor]:
    """`growth` with one level more, in place but for the first: `drawn` [R, W, K] from `q` [R, W, V] float32, and none
    in `dead` [R, W] rows.

    Returns:
        The growth, and the nodes [R, W] bool whose children were drawn.
    """
    level = growth.plan.levels[growth.level]
    requests, width, ranks = drawn.shape
    tokens, path, read = growth.tokens, growth.path, growth.read
    if growth.level == 0:
        tokens, path, read = tokens.clone(), path.clone(), read.clone()
    exists = torch.empty_like(dead)
    if requests:
        _place[(requests,)](
            *(tokens, path, read, exists, drawn.contiguous(), q, dead.contiguous(), growth.going.contiguous()),
            *(level.inner, level.children, level.column, level.rank),
            *(tokens.shape[1], len(level.inner), len(level.children), width, ranks, growth.next_slot, q.shape[2]),
            FIRST=growth.level == 0,
            EMPTY=EMPTY,
            PADDED=triton.next_power_of_2(max(len(level.children), width)),
            num_warps=1,
        )
    number, next_slot = growth.level + 1, growth.next_slot + width
    return growth._replace(tokens=tokens, path=path, read=read, level=number, next_slot=next_slot), exists
