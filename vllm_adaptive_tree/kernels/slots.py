"""Slots below a frontier, in one launch: their values, and the paths through their tokens."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.proposers.acceptance_table import (
    EDGES,
    LEAST,
    MOST,
    RANKS,
    SHAPE,
    WARM,
    AcceptanceTable,
    depth_group,
)
from vllm_adaptive_tree.proposers.adaptive_tree import LEAST_LEFT, SPREAD
from vllm_adaptive_tree.proposers.best_first import Candidates, Growth

MOST_CHILDREN = 64
"""Of a node, each of which is compared with all others."""


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _of_earlier(parts, rank):
    """Sum of the parts of earlier siblings. Its own is in no sum: rounding would let a value see its draw."""
    return tl.sum(tl.where(rank[None, :] < rank[:, None], parts[None, :], 0.0), 1)


@triton.jit
def _look_up(table, edges, centres, first, share, EDGES: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """`AcceptanceTable.look_up`: bin of each `share`, and its chance in the table's row that begins at `first`."""
    place = tl.zeros_like(first)
    for edge in tl.static_range(EDGES):
        place += (share >= tl.load(edges + edge)).to(first.dtype)
    left = place - (share < tl.load(centres + place)).to(first.dtype)
    left = tl.minimum(tl.maximum(left, 0), EDGES - 1)
    low, high = tl.load(centres + left), tl.load(centres + left + 1)
    from_left, from_right = tl.load(table + first + left), tl.load(table + first + left + 1)
    chance = from_left + (share - low) / (high - low) * (from_right - from_left)
    return first + place, tl.minimum(tl.maximum(chance, LEAST), MOST)


@triton.jit(do_not_specialize=["width", "above_row", "group", "children"])
def _slots(
    value_out,  # [R, W, K]
    path_out,  # [R, W, K]
    cell_out,  # [R, W, K]
    column_out,  # [R, W, K]
    tokens,  # [R, W, K], -1: none
    q,  # [R, W, V]
    best_share,  # [R, W]: the largest of q
    best_token,  # [R, W]
    path,  # [R, W]
    above,  # [R, W or more]: values of the parents
    temperature,  # [R]
    greedy,  # [R] bool
    chosen,  # [R] bool
    table,  # cells
    edges,  # [EDGES]
    centres,  # [EDGES + 1]
    warm,  # [WARM]
    ranks,  # [RANKS]
    width,
    above_row,
    group,  # of the depth
    children,
    vocabulary,
    EDGES: tl.constexpr,
    WARM: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTHS: tl.constexpr,  # groups of depths, and of ranks
    RANK_GROUPS: tl.constexpr,
    SPREAD: tl.constexpr,
    LEAST_LEFT: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two
):
    node = tl.program_id(0).to(tl.int64)
    request = node // width
    rank = tl.arange(0, PADDED)
    exists = rank < children
    token = tl.load(tokens + node * children + rank, mask=exists, other=-1)
    chance = tl.load(q + node * vocabulary + token, mask=token >= 0, other=0.0)
    left = tl.maximum(1.0 - _of_earlier(chance, rank), LEAST_LEFT)

    heat, from_target = tl.load(temperature + request), tl.load(chosen + request) != 0
    drawn = tl.full([], 2, tl.int64)
    for bound in tl.static_range(WARM):
        drawn += (tl.load(warm + bound) < heat).to(tl.int64)
    kind = tl.where(from_target, tl.where(tl.load(greedy + request) != 0, 0, 1), drawn)
    rank_group = tl.load(ranks + tl.minimum(rank, RANKS - 1))
    first = (kind * DEPTHS + group) * (RANK_GROUPS * (EDGES + 1)) + rank_group * (EDGES + 1)

    cell, accepted = _look_up(table, edges, centres, first, chance / left, EDGES, LEAST, MOST)
    reached = tl.load(path + node) + _of_earlier(tl.log(1.0 - accepted), rank)
    reached = tl.where(chance > 0, reached, float("-inf"))
    below = reached + tl.log(accepted)

    # before the token is drawn: see `AdaptiveTree._expected`
    is_best = (token == tl.load(best_token + node)).to(tl.int32)
    taken = tl.cumsum(is_best, 0) > is_best
    share = tl.where(taken, 0.0, tl.minimum(tl.load(best_share + node) / left, 1.0))
    _, of_best = _look_up(table, edges, centres, first, share, EDGES, LEAST, MOST)
    _, of_others = _look_up(table, edges, centres, first, (1.0 - share) / SPREAD, EDGES, LEAST, MOST)
    parent = tl.load(above + request * above_row + node % width)
    before = tl.minimum(reached + tl.log(of_others + share * (of_best - of_others)), parent)
    before = tl.associative_scan(before, 0, _smaller)
    at = node * children + rank
    tl.store(value_out + at, tl.where(from_target, tl.minimum(below, parent), before), mask=exists)
    tl.store(path_out + at, below, mask=exists)
    tl.store(cell_out + at, cell, mask=exists)
    tl.store(column_out + at, tl.zeros_like(cell) + node % width, mask=exists)


def slot_values(
    tokens: Tensor, q: Tensor, best: tuple[Tensor, Tensor], growth: Growth, chosen: Tensor, table: AcceptanceTable
) -> Candidates:
    """Do `AdaptiveTree.slots` in one launch.

    Args:
        tokens: [R, W, K] children of the frontier's first W columns; -1 pads.
        q: [R, W, V] float32, contiguous.
        best: largest of each of its rows, and the token, [R, W] each.
        chosen: [R] bool.
    """
    requests, width, children = tokens.shape
    value, path = (torch.empty((requests, width * children), dtype=q.dtype, device=q.device) for _ in range(2))
    cell, column = (torch.empty_like(value, dtype=torch.int64) for _ in range(2))
    request, above = growth.request, growth.front.value
    assert above.stride(1) == 1
    assert q.is_contiguous()
    if requests:
        _slots[(requests * width,)](
            *(value, path, cell, column, tokens, q, *best),
            *(growth.front.path[:, :width].contiguous(), above, request.temperature.contiguous()),
            *(request.greedy.contiguous(), chosen.contiguous()),
            *(table.chance, table.edges, table.centres, table.warm, table.ranks),
            *(width, above.stride(0), depth_group(growth.level + 1), children, q.shape[-1]),
            EDGES=len(EDGES),
            WARM=len(WARM),
            RANKS=len(RANKS),
            DEPTHS=SHAPE[1],
            RANK_GROUPS=SHAPE[2],
            SPREAD=SPREAD,
            LEAST_LEFT=LEAST_LEFT,
            LEAST=LEAST,
            MOST=MOST,
            PADDED=triton.next_power_of_2(children),
            num_warps=1,
        )
    return Candidates(tokens.flatten(1), column, value, path, children, cell)


@triton.jit(do_not_specialize=["width", "children"], do_not_specialize_on_alignment=["least"])
def _draft_slots(
    value_out,  # [R, W, K]
    path_out,  # [R, W, K]
    column_out,  # [R, W, K]
    tokens,  # [R, W, K], -1: none
    q,  # [R, W, V]
    path,  # [R, W]
    least,  # []
    width,
    children,
    vocabulary,
    PADDED: tl.constexpr,  # a power of two
):
    node = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, PADDED)
    exists, at = rank < children, node * children + rank
    token = tl.load(tokens + at, mask=exists, other=-1)
    chance = tl.load(q + node * vocabulary + token, mask=token >= 0, other=0.0)
    above, smallest = tl.load(path + node), tl.load(least).to(tl.float32)
    before = 1.0 - _of_earlier(chance.to(tl.float64), rank).to(tl.float32)
    # Rounding must not sort a sibling before an earlier one, nor a child's slot before its parent's.
    before = tl.associative_scan(tl.maximum(before, 0.0), 0, _smaller)
    value = above + tl.log(before)
    value = tl.where((token < 0) | (value < smallest), float("-inf"), value)
    below = tl.minimum(above + tl.log(chance), value)
    tl.store(value_out + at, value, mask=exists)
    tl.store(path_out + at, tl.where(below < smallest, float("-inf"), below), mask=exists)
    tl.store(column_out + at, tl.zeros_like(token) + node % width, mask=exists)


def draft_slots(tokens: Tensor, q: Tensor, growth: Growth, least: Tensor) -> Candidates:
    """Values of DySpec's slots: chances under the draft that all above are accepted and all earlier siblings rejected.

    Args:
        tokens: [R, W, K] children of the frontier's first W columns; -1 pads.
        q: [R, W, V] float32, contiguous.
        least: [] log value, below which there is no slot, and no path that goes on.
    """
    requests, width, children = tokens.shape
    value, path = (torch.empty((requests, width * children), dtype=q.dtype, device=q.device) for _ in range(2))
    column = torch.empty_like(value, dtype=torch.int64)
    assert q.is_contiguous()
    if requests:
        _draft_slots[(requests * width,)](
            *(value, path, column, tokens, q, growth.front.path[:, :width].contiguous(), least),
            *(width, children, q.shape[-1]),
            PADDED=triton.next_power_of_2(children),
            num_warps=1,
        )
    return Candidates(tokens.flatten(1), column, value, path, children)
