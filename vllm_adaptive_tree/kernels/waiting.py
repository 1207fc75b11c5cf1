"""States of the target that wait for a resting head, copied in one launch."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Entries of a state that a program copies."""


@triton.jit(
    do_not_specialize=["positions", "longest"],
    do_not_specialize_on_alignment=["request", "end", "count", "row", "fresh"],
)
def _wait(
    kept,  # [requests * positions, H], in place
    start,  # [requests], in place where `fresh`
    states,  # [rows, H]
    request,  # [R]
    end,  # [R]: position after the last row
    count,  # [R]: rows
    row,  # [R, L]
    fresh,  # [R] bool
    positions,
    longest,
    size,
    BLOCK: tl.constexpr,
):
    number, entry = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index, rows = tl.load(request + number), tl.load(count + number).to(tl.int64)
    first = tl.load(end + number).to(tl.int64) - rows
    for column in range(longest):
        source = tl.load(row + number * longest + column)
        there = (entry < size) & (column < rows)
        place = index * positions + (first + column) % positions
        tl.store(kept + place * size + entry, tl.load(states + source * size + entry, mask=there, other=0), mask=there)
    begins = (tl.load(fresh + number) != 0) & (tl.program_id(1) == 0)
    tl.store(start + index, first, mask=begins)


def wait(
    kept: Tensor, start: Tensor, states: Tensor, request: Tensor, end: Tensor, count: Tensor, row: Tensor, fresh: Tensor
) -> None:
    """Copy rows of `states` [rows, H] into the rings of R requests, and where they begin of those that are `fresh`.

    Args:
        kept: [requests, positions, H], of all requests.
        start: [requests] first position of what waits.
        request: [R] int64 index of each request.
        end, count: [R] position after its last row, and number of rows.
        row: [R, L] int64; those after the first `count` are not copied, and may be any row.
        fresh: [R] bool.
    """
    _, positions, size = kept.shape
    if len(request):
        _wait[(len(request), triton.cdiv(size, BLOCK))](
            *(kept, start, states.contiguous(), request, end, count, row.contiguous(), fresh),
            *(positions, row.shape[1], size),
            BLOCK=min(BLOCK, triton.next_power_of_2(size)),
            num_warps=4,
        )
