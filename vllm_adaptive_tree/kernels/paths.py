"""The path to every node of the trees, side by side in one tensor: one launch."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class PathWindows(NamedTuple):
    """A window of L + 1 rows for each row of the logits, the path to its node at the end of it."""

    tokens: Tensor  # [rows * (L + 1)] int32: of the path, the root's first; before it the root's again
    place: Tensor  # [rows * (L + 1)] int32: depth of the node in the last row of a window, 0 in the others
    request: Tensor  # [rows * (L + 1)] int32: vLLM's index in the last row of a window, that of nobody in the others
    length: int  # L + 1


@triton.jit(
    do_not_specialize=["nodes", "length", "nobody"],
    do_not_specialize_on_alignment=["tokens", "parent", "start", "index"],
)
def _windows(
    tokens_out,  # [rows, length]
    place_out,  # [rows, length]
    request_out,  # [rows, length]
    tokens,  # [rows]
    parent,  # [R, N]
    start,  # [R + 1]
    index,  # [R]
    nodes,
    length,
    nobody,
    PADDED: tl.constexpr,  # a power of two
):
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(start + request).to(tl.int64)
    lane = tl.arange(0, PADDED).to(tl.int64)
    exists = lane < tl.load(start + request + 1) - first
    own = tl.load(index + request)
    at, depth = lane, tl.zeros_like(lane)  # the root is 0
    for back in range(length):
        row = (first + lane) * length + length - 1 - back
        tl.store(tokens_out + row, tl.load(tokens + first + at, mask=exists, other=0), mask=exists)
        tl.store(request_out + row, tl.where(back == 0, own, nobody), mask=exists)
        tl.store(place_out + row, 0, mask=exists)
        below = exists & (at > 0)
        above = tl.load(parent + request * nodes + at - 1, mask=below, other=-1) + 1
        depth += below.to(tl.int64)
        at = tl.maximum(above, 0)
    tl.store(place_out + (first + lane) * length + length - 1, depth.to(tl.int32), mask=exists)


def path_windows(
    parent: Tensor, tokens: Tensor, start: Tensor, index: Tensor, *, levels: int, nobody: int
) -> PathWindows:
    """Lay out the windows of R trees.

    Args:
        parent: [R, N] of each node, -1: the root.
        tokens: [rows] int32, of the roots and their nodes, request by request.
        start: [R + 1] int32, the first row of each request.
        index: [R] int32, vLLM's index of each request.
        levels: L, largest depth of a node.
        nobody: index for rows that are of no request.
    """
    requests, nodes = parent.shape
    length = levels + 1
    rows = len(tokens) * length
    path, place, own = (torch.empty(rows, dtype=torch.int32, device=tokens.device) for _ in range(3))
    windows = PathWindows(path, place, own, length)
    if requests:
        _windows[(requests,)](
            *(*windows[:3], tokens.contiguous(), parent.contiguous(), start, index, nodes, length, nobody),
            PADDED=triton.next_power_of_2(nodes + 1),
            num_warps=1,
        )
    return windows
