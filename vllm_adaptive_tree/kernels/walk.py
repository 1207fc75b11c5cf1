"""Walk over trees whose tokens have all been sampled already."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.trees import TreeBatch


@triton.jit(do_not_specialize=["nodes"], do_not_specialize_on_alignment=["sampled", "root_row", "tokens", "parent"])
def _walk(
    tokens_out,  # [R, STEPS]
    nodes_out,  # [R, STEPS]
    sampled,  # [rows]
    root_row,  # [R]: the row of each root
    tokens,  # [R, N]
    parent,  # [R, N]
    nodes,
    STEPS: tl.constexpr,
    PADDED_NODES: tl.constexpr,  # a power of two
):
    request = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, PADDED_NODES).to(tl.int64)
    token_of = tl.load(tokens + request * nodes + slot, mask=slot < nodes, other=-1)
    parent_of = tl.load(parent + request * nodes + slot, mask=slot < nodes, other=-2)
    root = tl.load(root_row + request).to(tl.int64)
    node = tl.full([], -1, tl.int64)
    going = tl.full([], 1, tl.int32)
    for step in range(STEPS):
        token = tl.load(sampled + root + 1 + node)
        hit = (parent_of == node) & (token_of == token) & (token_of >= 0)
        child = tl.min(tl.where(hit, slot, PADDED_NODES), 0)
        tl.store(tokens_out + request * STEPS + step, tl.where(going != 0, token, -1))
        going = tl.where(child < PADDED_NODES, going, 0)
        tl.store(nodes_out + request * STEPS + step, tl.where(going != 0, child, -1))
        node = tl.where(going != 0, child, node)


def walk(tree: TreeBatch, sampled: Tensor, root_row: Tensor, *, levels: int) -> Accepted:
    """Walk like `acceptance.walk`, with all tokens sampled beforehand.

    Args:
        sampled: [rows], the token sampled at every row.
        root_row: [R], the row of each root; the rows of its nodes follow.
    """
    requests, slots = tree.tokens.shape
    shape = requests, levels + 1
    tokens, nodes = (torch.empty(shape, dtype=torch.int64, device=sampled.device) for _ in range(2))
    if requests:
        _walk[(requests,)](
            *(tokens, nodes, sampled.contiguous(), root_row.contiguous(), tree.tokens.contiguous()),
            *(tree.parent.contiguous(), slots),
            STEPS=levels + 1,
            PADDED_NODES=triton.next_power_of_2(slots),
            num_warps=1,
        )
    return Accepted(tokens, nodes)
