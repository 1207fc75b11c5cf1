"""The accepted paths behind their roots, as a draft reads the rows of a verification: one launch."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.trees.tree_batch import EMPTY


@triton.jit(
    do_not_specialize=["nodes", "levels"],
    do_not_specialize_on_alignment=["positions", "input_ids", "first", "root", "drafted", "tokens", "accepted"],
)
def _path(
    rows,  # [rows], as the next two in place
    positions,  # [rows]
    input_ids,  # [rows]
    first,  # [R]
    root,  # [R]
    drafted,  # [R, nodes]
    tokens,  # [R, levels]
    accepted,  # [R, levels]
    nodes,
    levels,
    EMPTY: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two above both
):
    request, lane = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED).to(tl.int64)
    after = tl.load(first + request) + 1
    token = tl.load(drafted + request * nodes + lane, mask=lane < nodes, other=EMPTY)
    tl.store(positions + after + lane, tl.load(root + request) + 1 + lane, mask=token != EMPTY)
    at = request * levels + lane
    node = tl.load(accepted + at, mask=lane < levels, other=-1)
    tl.store(rows + after + lane, after + node, mask=node >= 0)
    token = tl.load(tokens + at, mask=node >= 0, other=0)
    tl.store(input_ids + after + lane, token.to(tl.int32), mask=node >= 0)


def write_accepted(
    positions: Tensor, input_ids: Tensor, first: Tensor, root: Tensor, drafted: Tensor, tokens: Tensor, nodes: Tensor
) -> Tensor:
    """Write the tokens of the accepted paths and the linear positions of all nodes behind the roots, in place.

    Args:
        positions: [rows] int64, of the batch.
        input_ids: [rows] int32.
        first, root: [R] row and position of each root.
        drafted: [R, N] tokens of the trees, -1 where there is no node.
        tokens, nodes: [R, L], accepted, of levels 1 to L; nodes by their row behind the root, -1 pads.

    Returns:
        [rows] int64: the rows of the batch, those behind a root replaced by the rows of its accepted nodes.
    """
    (requests, count), levels = drafted.shape, nodes.shape[1]
    rows = torch.arange(len(positions), device=positions.device)
    if requests and max(count, levels):
        _path[(requests,)](
            *(rows, positions, input_ids, first, root, drafted.contiguous()),
            *(tokens.contiguous(), nodes.contiguous(), count, levels),
            EMPTY=EMPTY,
            PADDED=triton.next_power_of_2(max(count, levels)),
            num_warps=1,
        )
    return rows
