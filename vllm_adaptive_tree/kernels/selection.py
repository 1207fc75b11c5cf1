"""Nodes that a batch verifies: how many of each tree, and where the rows of each request then begin."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Rivals that the nodes of a request are compared with at a time."""
MOST_NODES = 1 << 14
"""Of all lists together: every node is compared with all others."""
LEAST = -1e30
"""Value of an empty place within a list's capacity, which comes before those beyond it."""


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["nodes"], do_not_specialize_on_alignment=["request", "capacity"])
def _falling(
    value_out,  # [R, N]
    weight,  # [B, N] log values of the drafted trees
    place,  # [requests]: the tree of each, below 0: none
    request,  # [R]
    capacity,  # [R] int32
    nodes,
    BY_PLACE: tl.constexpr,
    LEAST: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two
):
    number, node = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    tree = tl.load(place + tl.load(request + number))
    if BY_PLACE:
        value = -node.to(tl.float32)
    else:
        value = tl.load(weight + tree * nodes + node, mask=(node < nodes) & (tree >= 0), other=LEAST)
    value = tl.associative_scan(tl.maximum(tl.where(tree >= 0, value, LEAST), LEAST), 0, _smaller)
    value = tl.where(node < tl.load(capacity + number), value, float("-inf"))
    tl.store(value_out + number * nodes + node, value, mask=node < nodes)


@triton.jit(do_not_specialize=["count", "requests", "nodes"])
def _kept(
    kept_out,  # [R] int32
    value,  # [R, N], falling in each row
    count,
    requests,
    nodes,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two
):
    number, node, one = tl.program_id(0), tl.arange(0, PADDED), tl.arange(0, BLOCK)
    own = tl.load(value + number.to(tl.int64) * nodes + node, mask=node < nodes, other=float("-inf"))
    before = tl.zeros([PADDED], tl.int32)
    for start in range(0, requests * nodes, BLOCK):
        at = start + one
        there = at < requests * nodes
        rival = tl.load(value + at, mask=there, other=float("-inf"))
        # of equal values the earlier place in its list comes first, then the earlier request
        order = at % nodes * requests + at // nodes
        earlier = order[None, :] < (node * requests + number)[:, None]
        first = (rival[None, :] > own[:, None]) | ((rival[None, :] == own[:, None]) & earlier & there[None, :])
        before += tl.sum(first.to(tl.int32), 1)
    tl.store(kept_out + number, tl.sum(((before < count) & (node < nodes)).to(tl.int32), 0))


@triton.jit(do_not_specialize=["requests", "starts", "rows"], do_not_specialize_on_alignment=["kept", "others"])
def _starts(
    logits_out,  # [R + 1] int32
    rows_out,  # [starts] int32
    kept,  # [R] int32
    others,  # [R] int32: rows of each request besides its nodes
    requests,
    starts,
    rows,  # of all requests
    PADDED: tl.constexpr,  # a power of two
):
    at = tl.arange(0, PADDED)
    number = tl.load(kept + at - 1, mask=(at > 0) & (at <= requests), other=0)
    other = tl.load(others + at - 1, mask=(at > 0) & (at <= requests), other=0)
    root = ((at > 0) & (at <= requests)).to(tl.int32)
    tl.store(logits_out + at, tl.cumsum(number + root, 0), mask=at <= requests)
    tl.store(rows_out + at, tl.where(at <= requests, tl.cumsum(number + other, 0), rows), mask=at < starts)


def top_nodes(
    weight: Tensor, place: Tensor, request: Tensor, capacity: Tensor, count: int, *, by_place: bool
) -> Tensor:
    """Do `budget.top_nodes` for drafted trees: [R] int32.

    Args:
        weight: [B, N] float32 log values of the nodes of each tree.
        place: [requests] tree of each request; -1: none.
        request: [R] int64 index of each request in `place`.
        capacity: [R] int32.
        by_place: True to take a node's place in its list in place of its value.
    """
    requests, nodes = len(request), weight.shape[1]
    value = torch.empty((requests, nodes), dtype=torch.float32, device=weight.device)
    kept = torch.empty(requests, dtype=torch.int32, device=weight.device)
    padded = triton.next_power_of_2(nodes)
    if requests:
        _falling[(requests,)](
            *(value, weight, place, request, capacity, nodes),
            BY_PLACE=by_place,
            LEAST=LEAST,
            PADDED=padded,
            num_warps=1,
        )
        _kept[(requests,)](kept, value, count, requests, nodes, BLOCK=BLOCK, PADDED=padded, num_warps=4)
    return kept


def row_starts(kept: Tensor, others: Tensor, starts: Tensor, rows: int) -> Tensor:
    """Write the first row of each request to `starts` [requests + 1] int32, and `rows`, those of all, behind them.

    Args:
        kept: [R] int32 nodes of each request.
        others: [R] int32, its rows besides them.

    Returns:
        The first row of its logits, [R + 1] int32.
    """
    requests = len(kept)
    logits = torch.empty(requests + 1, dtype=torch.int32, device=kept.device)
    _starts[(1,)](
        *(logits, starts, kept, others, requests, len(starts), rows),
        PADDED=triton.next_power_of_2(len(starts)),
        num_warps=4,
    )
    return logits
