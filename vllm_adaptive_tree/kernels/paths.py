"""The path to every node of the trees, side by side in one tensor: one launch."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class PathWindows(NamedTuple):
    """A window of L + 1 rows for each row of logits: the path to its node at the end of it, before that the root again
    and again."""

    tokens: Tensor  # [rows * (L + 1)] int32: of the path
    place: Tensor  # [rows * (L + 1)] int32: depth of each
    request: Tensor  # [rows * (L + 1)]: vLLM's index in the last row of a window, that of nobody in the others
    length: int  # L + 1


@triton.jit
def _above(parent, at, exists):
    """The row above each row `at` of a request, the root is 0; and whether there is one."""
    below = exists & (at > 0)
    return tl.maximum(tl.load(parent + at - 1, mask=below, other=-1) + 1, 0), below.to(tl.int64)


@triton.jit(
    do_not_specialize=["nodes", "length", "nobody"],
    do_not_specialize_on_alignment=["tokens", "parent", "start", "index", "node"],
)
def _windows(
    tokens_out,  # [rows, length]
    place_out,  # [rows, length]
    request_out,  # [rows, length]
    tokens,  # [all rows]
    parent,  # [R, N]
    start,  # [R + 1]
    index,  # [R]
    node,  # [R]
    nodes,
    length,
    nobody,
    ALL: tl.constexpr,  # the rows are all of the batch, and not that of `node` for each request
    PADDED: tl.constexpr,  # a power of two
):
    request, lane = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED).to(tl.int64)
    first = tl.load(start + request).to(tl.int64)
    parent += request * nodes
    if ALL:
        row, at, exists = first + lane, lane, lane < tl.load(start + request + 1) - first
    else:
        row, at, exists = request + lane, lane + 1 + tl.load(node + request), lane < 1
    own = tl.load(index + request)
    depth, up = tl.zeros_like(lane), at
    for _ in range(length - 1):
        up, went = _above(parent, up, exists)
        depth += went
    for back in range(length):
        out = row * length + length - 1 - back
        tl.store(tokens_out + out, tl.load(tokens + first + at, mask=exists, other=0), mask=exists)
        tl.store(place_out + out, tl.maximum(depth - back, 0).to(tl.int32), mask=exists)
        tl.store(request_out + out, tl.where(back == 0, own, nobody), mask=exists)
        at, went = _above(parent, at, exists)


def path_windows(
    parent: Tensor,
    tokens: Tensor,
    start: Tensor,
    index: Tensor,
    node: Tensor | None = None,
    *,
    levels: int,
    nobody: int,
) -> PathWindows:
    """Lay out the windows of R trees.

    Args:
        parent: [R, N] of each node, -1: the root.
        tokens: [all rows] int32, of the roots and their nodes, request by request.
        start: [R + 1] int32, the first of these rows of each request.
        index: [R], vLLM's index of each request.
        node: [R], the node of each request whose row is meant; None: all rows.
        levels: L, largest depth of a node.
        nobody: index for rows that are of no request.
    """
    requests, nodes = parent.shape
    length, rows = levels + 1, len(tokens) if node is None else requests
    path, place = (torch.empty(rows * length, dtype=torch.int32, device=tokens.device) for _ in range(2))
    own = index.new_empty(rows * length)  # vLLM's kernels multiply it by the rows of their tables, beyond 32 bits
    if requests:
        _windows[(requests,)](
            *(path, place, own, tokens.contiguous(), parent.contiguous(), start, index),
            *(start if node is None else node.contiguous(), nodes, length, nobody),
            ALL=node is None,
            PADDED=triton.next_power_of_2(nodes + 1) if node is None else 1,
            num_warps=1,
        )
    return PathWindows(path, place, own, length)
