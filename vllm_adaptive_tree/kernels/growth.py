"""Growth of a level of best-first trees: values of slots in one launch, what is kept and expanded in another."""

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
from vllm_adaptive_tree.proposers.best_first import Candidates, Growth, Level
from vllm_adaptive_tree.trees.tree_batch import EMPTY

MOST_CANDIDATES = 4096
"""Of a request, which one program keeps the best of."""
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


@triton.jit(do_not_specialize=["columns", "width", "first"])
def _slots_read(
    slot_out,  # [R, C]
    expand,  # [R, C] bool
    dead,  # [R, W] bool
    columns,
    width,
    first,
    PADDED: tl.constexpr,  # a power of two
):
    request, lane = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    at = request * columns + lane
    expanded = tl.load(expand + at, mask=lane < columns, other=0).to(tl.int32)
    column = tl.cumsum(expanded, 0) - 1
    read = (expanded != 0) & (column < width)
    lost = tl.load(dead + request * width + column, mask=read, other=1).to(tl.int32)
    tl.store(slot_out + at, tl.where(lost == 0, column + first, -1).to(tl.int64), mask=lane < columns)


def slots_read(growth: Growth, dead: Tensor) -> Tensor:
    """Do `BestFirst.slots_read` in one launch."""
    requests, columns = growth.expand.shape
    slot = torch.empty_like(growth.expand, dtype=torch.int64)
    if slot.numel():
        _slots_read[(requests,)](
            *(slot, growth.expand.contiguous(), dead.contiguous(), columns, dead.shape[1], growth.first),
            PADDED=triton.next_power_of_2(columns),
            num_warps=1,
        )
    return slot


@triton.jit
def _before(rival, worth, other, candidate):
    """[M, B]: True where a rival comes before a candidate: it is worth more, or stands before an equal one."""
    equal = (rival[None, :] == worth[:, None]) & (other[None, :] < candidate[:, None])
    return (rival[None, :] > worth[:, None]) | equal


@triton.jit(
    do_not_specialize=["count", "columns", "nodes", "first"], do_not_specialize_on_alignment=["threshold", "floor"]
)
def _keep(
    tokens_out,  # [R, C], as the next nine
    parent_out,
    value_out,
    path_out,
    cell_out,
    expand_out,
    front_tokens_out,
    front_parent_out,
    front_value_out,
    front_path_out,
    best_out,  # [R, N]
    total_out,  # [R]
    tokens,  # [R, M], as the next four
    column,
    value,
    path,
    cell,
    best,  # [R, N]
    total,  # [R]
    threshold,  # []
    floor,  # []
    count,
    columns,
    nodes,
    first,
    CELLS: tl.constexpr,
    EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,  # rivals at a time
    PADDED: tl.constexpr,  # a power of two, as the next
    PADDED_NODES: tl.constexpr,
):
    """Every candidate counts those before it: its place. No sort, whose code would take seconds to compile."""
    request = tl.program_id(0).to(tl.int64)
    candidate, lane, one = tl.arange(0, PADDED), tl.arange(0, PADDED_NODES), tl.arange(0, BLOCK)
    there, source = candidate < count, request * count + candidate
    worth = tl.load(value + source, mask=there, other=float("-inf"))
    through = tl.load(path + source, mask=there, other=float("-inf"))
    so_far = tl.load(best + request * nodes + lane, mask=lane < nodes, other=float("-inf"))
    place, old_place = tl.zeros([PADDED], tl.int32), lane
    for start in range(0, count, BLOCK):
        other = start + one
        rival = tl.load(value + request * count + other, mask=other < count, other=float("-inf"))
        place += tl.sum(_before(rival, worth, other, candidate).to(tl.int32), 1)
        old_place += tl.sum((rival[None, :] > so_far[:, None]).to(tl.int32), 1)
    new_place = place
    for start in range(0, nodes, BLOCK):
        other = start + one
        rival = tl.load(best + request * nodes + other, mask=other < nodes, other=float("-inf"))
        new_place += tl.sum((rival[None, :] >= worth[:, None]).to(tl.int32), 1)

    old_stays, new_stays = (lane < nodes) & (old_place < nodes), there & (new_place < nodes)
    tl.store(best_out + request * nodes + old_place, so_far, mask=old_stays)
    tl.store(best_out + request * nodes + new_place, worth, mask=new_stays)
    summed = tl.sum(tl.where(old_stays, tl.exp(so_far), 0.0), 0) + tl.sum(tl.where(new_stays, tl.exp(worth), 0.0), 0)
    tl.store(total_out + request, summed)
    old_worst = tl.max(tl.where(old_stays & (old_place == nodes - 1), so_far, float("-inf")), 0)
    new_worst = tl.max(tl.where(new_stays & (new_place == nodes - 1), worth, float("-inf")), 0)

    enough = summed - tl.load(total + request) > tl.load(threshold).to(tl.float32)
    least = tl.maximum(tl.maximum(old_worst, new_worst), tl.load(floor).to(tl.float32))
    least = tl.where(enough, least, float("inf"))
    inside, at = there & (place < columns), request * columns + place
    expand = inside & (tl.minimum(through, worth) > least)
    to = tl.zeros([PADDED], tl.int32)
    for start in range(0, count, BLOCK):
        other = start + one
        rival = tl.load(value + request * count + other, mask=other < count, other=float("-inf"))
        rival_path = tl.load(path + request * count + other, mask=other < count, other=float("-inf"))
        goes = tl.minimum(rival, rival_path) > least
        to += tl.sum((_before(rival, worth, other, candidate) & goes[None, :]).to(tl.int32), 1)

    token, parent = tl.load(tokens + source, mask=there, other=EMPTY), tl.load(column + source, mask=there, other=0)
    parent += first
    tl.store(tokens_out + at, token, mask=inside)
    tl.store(parent_out + at, parent, mask=inside)
    tl.store(value_out + at, worth, mask=inside)
    tl.store(path_out + at, through, mask=inside)
    tl.store(expand_out + at, expand, mask=inside)
    if CELLS:
        tl.store(cell_out + at, tl.load(cell + source, mask=there, other=0), mask=inside)
    used, front = request * columns + to, request * columns + candidate
    tl.store(front_tokens_out + used, token, mask=expand)
    tl.store(front_parent_out + used, parent, mask=expand)
    tl.store(front_value_out + used, worth, mask=expand)
    tl.store(front_path_out + used, through, mask=expand)
    unused = (candidate < columns) & (candidate >= tl.sum(expand.to(tl.int32), 0))
    tl.store(front_tokens_out + front, EMPTY, mask=unused)
    tl.store(front_parent_out + front, 0, mask=unused)
    tl.store(front_value_out + front, float("-inf"), mask=unused)
    tl.store(front_path_out + front, float("-inf"), mask=unused)


def kept(
    growth: Growth, candidates: Candidates, *, width: int, threshold: float | Tensor, floor: float | Tensor
) -> Growth:
    """`growth` with one level more: the best of M candidates, in any order, and those of them to expand.

    A node is expanded if its value and its path are above the n-th best value and `floor`, and the level has brought
    more than `threshold`.

    Args:
        width: columns of the frontier that the candidates are of.
    """
    value = candidates.value
    (requests, count), nodes = value.shape, growth.nodes
    columns = min(count, nodes)
    wide = (torch.empty((requests, columns), dtype=torch.int64, device=value.device) for _ in range(5))
    tokens, parent, cell, front_tokens, front_parent = wide
    narrow = (torch.empty((requests, columns), dtype=value.dtype, device=value.device) for _ in range(4))
    level_value, path, front_value, front_path = narrow
    expand = torch.empty_like(tokens, dtype=torch.bool)
    best, total = torch.empty_like(growth.best), torch.empty_like(growth.total)
    limits = (_scalar(limit, value.device) for limit in (threshold, floor))
    columns_of = (candidates.tokens, candidates.parent_column, value, candidates.path)
    parts = [part.contiguous() for part in columns_of]
    cells = tokens if candidates.cell is None else candidates.cell.contiguous()
    padded = triton.next_power_of_2(count)
    if requests:
        _keep[(requests,)](
            *(tokens, parent, level_value, path, cell, expand, front_tokens, front_parent, front_value, front_path),
            *(best, total, *parts, cells, growth.best, growth.total, *limits, count, columns, nodes, growth.first),
            CELLS=candidates.cell is not None,
            EMPTY=EMPTY,
            BLOCK=rivals_at_a_time(padded),
            PADDED=padded,
            PADDED_NODES=triton.next_power_of_2(nodes),
            num_warps=4 if count <= 1024 else 8,
        )
    level = Level(tokens, parent, level_value, path, None if candidates.cell is None else cell)
    return growth._replace(
        levels=(*growth.levels, level),
        best=best,
        total=total,
        expand=expand,
        front=Level(front_tokens, front_parent, front_value, front_path),
        first=growth.first + width,
        num_planned=candidates.num_planned,
    )


def rivals_at_a_time(padded: int) -> int:
    """Rivals that so many candidates are compared with at a time, in registers."""
    return max(2, min(16, (1 << 13) // padded))


def _scalar(limit: float | Tensor, device: torch.device) -> Tensor:
    return limit if isinstance(limit, Tensor) else torch.full((), limit, dtype=torch.float64, device=device)
