"""Walk of RRS and RRSw, one program per request: a pass over both distributions at each visited node and rejection."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.acceptance.rejection import rounding_mass
from vllm_adaptive_tree.acceptance.rrs import RRS, RRSw
from vllm_adaptive_tree.acceptance.rule import Draw
from vllm_adaptive_tree.kernels.rejection import BLOCK, _test_child
from vllm_adaptive_tree.kernels.rng import mix, uniform
from vllm_adaptive_tree.kernels.sampling import FusedRNG
from vllm_adaptive_tree.kernels.traversal import _norm
from vllm_adaptive_tree.trees import TreeBatch

REJECTION_RULES: dict[Draw, bool] = {RRS.draw: True, RRSw.draw: False}
"""Rules that the kernel supports -> True if children are drawn with replacement."""


@triton.jit
def _write_softmax(out, logits, temperature, vocabulary, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    """Write softmax(logits / temperature) of a row to `out`."""
    peak, total = _norm(logits, temperature, vocabulary, BLOCK, TYPE)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        in_vocab = token < vocabulary
        scaled = tl.load(logits + token, mask=in_vocab, other=float("-inf")).to(TYPE) / temperature
        tl.store(out + token, tl.exp(scaled - peak) / total.to(TYPE), mask=in_vocab)


@triton.jit(
    do_not_specialize=["nodes", "slots"],
    do_not_specialize_on_alignment=["tokens", "parent", "root_row", "place", "slot", "key", "selected"],
)
def _reject(
    tokens_out,  # [R, STEPS]: the accepted path, -1 pads
    nodes_out,  # [R, STEPS]: its nodes
    depth_out,  # [R]: its length
    end_out,  # [R]: 1 + its last node
    p,  # [R, V]: the residual after the path, not normalised
    q,  # [R, V] scratch
    tokens,  # [R, N]
    parent,  # [R, N]
    target,  # [rows, V] logits
    root_row,  # [R]: the row of each root
    draft,  # [B, S, V] logits
    place,  # [R] in the draft's batch
    slot,  # [R, 1 + N]: of the draft, the root first; -1: never read
    temperature,  # [B]
    key,  # [R]
    selected,  # [R]: 0 for requests to skip
    nodes,
    slots,
    vocabulary,
    TINY: tl.constexpr,
    ROUNDING: tl.constexpr,
    REPLACED: tl.constexpr,  # whether children were drawn with replacement
    STEPS: tl.constexpr,
    PADDED_STEPS: tl.constexpr,  # a power of two, as the next
    PADDED_NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    if tl.load(selected + request) == 0:
        return
    p += request * vocabulary
    q += request * vocabulary
    index, step_of = tl.arange(0, PADDED_NODES), tl.arange(0, PADDED_STEPS)
    token_of = tl.load(tokens + request * nodes + index, mask=index < nodes, other=-1)
    parent_of = tl.load(parent + request * nodes + index, mask=index < nodes, other=-2)
    root = tl.load(root_row + request).to(tl.int64)
    base = tl.load(key + request)
    batch = tl.load(place + request).to(tl.int64)
    draft_temp = tl.load(temperature + batch).to(TYPE)
    path = tl.full([PADDED_STEPS], -1, tl.int64)
    path_nodes = tl.full([PADDED_STEPS], -1, tl.int64)
    node = tl.full([], -1, tl.int64)
    depth = tl.full([], 0, tl.int64)
    going = tl.full([], 1, tl.int32)
    while going != 0:
        stream = mix(base.to(tl.uint64) + mix((node + 1).to(tl.uint64))).to(tl.int64)
        is_child = (parent_of == node) & (token_of >= 0)
        number, count = tl.cumsum(is_child.to(tl.int64), 0), tl.sum(is_child.to(tl.int64), 0)
        tl.debug_barrier()  # all threads are done with the last node's
        _write_softmax(p, target + (root + 1 + node) * vocabulary, tl.full([], 1.0, TYPE), vocabulary, BLOCK, TYPE)
        if count > 0:
            read = tl.load(slot + request * (nodes + 1) + node + 1).to(tl.int64)
            _write_softmax(q, draft + (batch * slots + read) * vocabulary, draft_temp, vocabulary, BLOCK, TYPE)
        tl.debug_barrier()
        token = tl.full([], -1, tl.int64)
        mass = tl.full([], 1.0, tl.float64)  # of p
        rest = tl.full([], 1.0, tl.float64)  # of q
        i = tl.full([], 0, tl.int64)
        while (i < count) & (token < 0):
            i += 1
            x = tl.sum(tl.where(is_child & (number == i), token_of, 0), 0)
            stays, mass, rest = _test_child(
                p, q, x, uniform(stream, 2 * i), mass, rest, vocabulary, TINY, ROUNDING, REPLACED, BLOCK
            )
            token = tl.where(stays, x, token)
        going = (token >= 0).to(tl.int32)
        if token >= 0:
            child = tl.min(tl.where(is_child & (token_of == token), index, PADDED_NODES), 0).to(tl.int64)
            path = tl.where(step_of == depth, token, path)
            path_nodes = tl.where(step_of == depth, child, path_nodes)
            node = child
            depth += 1
    tl.store(tokens_out + request * STEPS + step_of, path, mask=step_of < STEPS)
    tl.store(nodes_out + request * STEPS + step_of, path_nodes, mask=step_of < STEPS)
    tl.store(depth_out + request, depth)
    tl.store(end_out + request, node + 1)


class RejectionInputs(NamedTuple):
    """Logits of both models, and the rows of each request and node."""

    target: Tensor  # [rows, V]
    root_row: Tensor  # [R]: the row of each root; the rows of its nodes follow
    draft: Tensor  # [B, S, V]
    place: Tensor  # [R] in the draft's batch
    slot: Tensor  # [R, 1 + N]: as in `Frontier`, the root first; any for a node without children
    temperature: Tensor  # [B], draft temperature


def rejection_walk(
    tree: TreeBatch, rule: Draw, inputs: RejectionInputs, rng: FusedRNG, *, levels: int, active: Tensor | None = None
) -> Accepted:
    """Walk like `acceptance.walk` with one of the `REJECTION_RULES`. A token sampled after all children are rejected
    ends the walk, even if rounding makes it the token of a child.

    Args:
        active: [R] bool; the results of the others are undefined. None: all.
    """
    requests, nodes = tree.tokens.shape
    target, draft = inputs.target.contiguous(), inputs.draft.contiguous()
    vocabulary = target.shape[1]
    wide = torch.promote_types(target.dtype, torch.float32)
    p, q = (target.new_empty(requests, vocabulary, dtype=wide) for _ in range(2))
    tokens, path = (target.new_empty(requests, levels + 1, dtype=torch.int64) for _ in range(2))
    depth, end = (target.new_empty(requests, dtype=torch.int64) for _ in range(2))
    if active is not None:  # of the others nothing is written
        for part, fill in ((p, 1), (tokens, -1), (path, -1), (depth, 0), (end, 0)):
            part.fill_(fill)
    selected = inputs.place.new_ones(requests, dtype=torch.int8) if active is None else active.to(torch.int8)
    if requests:
        _reject[(requests,)](
            *(tokens, path, depth, end, p, q, tree.tokens.contiguous(), tree.parent.contiguous(), target),
            *(inputs.root_row.contiguous(), draft, inputs.place.contiguous(), inputs.slot.contiguous()),
            *(inputs.temperature.contiguous(), rng.key.contiguous(), selected),
            *(nodes, draft.shape[1], vocabulary),
            TINY=torch.finfo(p.dtype).tiny,
            ROUNDING=rounding_mass(p),
            REPLACED=REJECTION_RULES[rule],
            STEPS=levels + 1,
            PADDED_STEPS=triton.next_power_of_2(levels + 1),
            PADDED_NODES=triton.next_power_of_2(nodes),
            BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)),
            TYPE=tl.float64 if p.dtype == torch.float64 else tl.float32,
            num_warps=16,
        )
    left = rng.fold_in(end).sample(p)
    return Accepted(tokens.scatter_(1, depth[:, None], left[:, None]), path)
