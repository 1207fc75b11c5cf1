"""Growth of a level of best-first trees: what is kept and expanded of its candidates in one launch, what was read in
another."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.proposers.best_first import Candidates, Growth, Level
from vllm_adaptive_tree.trees.tree_batch import EMPTY

MOST_CANDIDATES = 4096
"""Of a request, which one program keeps the best of."""
Limits = tuple[float | Tensor, float | Tensor]
"""Threshold and floor, as of `Proposer`."""


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
    LIMITED: tl.constexpr,  # by `threshold` and `floor`
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

    least = tl.maximum(old_worst, new_worst)
    if LIMITED:
        enough = summed - tl.load(total + request) > tl.load(threshold).to(tl.float32)
        least = tl.where(enough, tl.maximum(least, tl.load(floor).to(tl.float32)), float("inf"))
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


def kept(growth: Growth, candidates: Candidates, *, width: int, limits: Limits | None) -> Growth:
    """`growth` with one level more: the best of M candidates, in any order, and those of them to expand.

    A node is expanded if its value and its path are above the n-th best value and, with `limits`, above their floor,
    and the level has brought more than their threshold.

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
    numbers = [total] * 2 if limits is None else [scalar(limit, value.device) for limit in limits]
    columns_of = (candidates.tokens, candidates.parent_column, value, candidates.path)
    parts = [part.contiguous() for part in columns_of]
    cells = tokens if candidates.cell is None else candidates.cell.contiguous()
    padded = triton.next_power_of_2(count)
    if requests:
        _keep[(requests,)](
            *(tokens, parent, level_value, path, cell, expand, front_tokens, front_parent, front_value, front_path),
            *(best, total, *parts, cells, growth.best, growth.total, *numbers, count, columns, nodes, growth.first),
            CELLS=candidates.cell is not None,
            LIMITED=limits is not None,
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


def scalar(limit: float | Tensor, device: torch.device) -> Tensor:
    return limit if isinstance(limit, Tensor) else torch.full((), limit, dtype=torch.float64, device=device)
