"""Walk by a rule that tests children, one program per request: passes over both distributions of each visited node."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.acceptance.k_seq import halvings
from vllm_adaptive_tree.acceptance.rule import Draw
from vllm_adaptive_tree.kernels.rng import mix, uniform
from vllm_adaptive_tree.kernels.rules import accepted_child, constants
from vllm_adaptive_tree.kernels.sampling import BELOW_ONE, FusedRNG, pick
from vllm_adaptive_tree.kernels.traversal import _norm
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.vocab_ops import CHUNK


@triton.jit
def _write_softmax(out, logits, temperature, vocabulary, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    """Write softmax(logits / temperature) of a row to `out`."""
    peak, total = _norm(logits, temperature, vocabulary, BLOCK, TYPE)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        in_vocab = token < vocabulary
        scaled = tl.load(logits + token, mask=in_vocab, other=float("-inf")).to(TYPE) / temperature
        tl.store(out + token, tl.exp(scaled - peak) / total.to(TYPE), mask=in_vocab)


@triton.jit
def _write_sums(out, probs, vocabulary, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of each chunk of a row to `out`."""
    for start in range(0, chunks, BLOCK // CHUNK):
        chunk = start + tl.arange(0, BLOCK // CHUNK)
        token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        sums = tl.sum(tl.load(probs + token, mask=token < vocabulary, other=0.0), 1)
        tl.store(out + chunk, sums.to(tl.float64), mask=chunk < chunks)


@triton.jit(
    do_not_specialize=["nodes", "slots", "most", "halvings"],
    do_not_specialize_on_alignment=["tokens", "parent", "root_row", "place", "slot", "planned", "key", "selected"],
)
def _reject(
    tokens_out,  # [R, STEPS]: the accepted path and the token after it, -1 pads
    nodes_out,  # [R, STEPS]: their nodes
    p,  # [R, V] scratch
    q,  # [R, V] scratch
    sums,  # [R, chunks] scratch
    tokens,  # [R, N]
    parent,  # [R, N]
    target,  # [rows, V] logits
    root_row,  # [R]: the row of each root
    draft,  # [B, S, V] logits
    place,  # [R] in the draft's batch
    slot,  # [R, 1 + N]: of the draft, the root first; -1: never read
    planned,  # [R, 1 + N]: children planned, the root's first
    temperature,  # [B]
    key,  # [R]
    selected,  # [R]: 0 for requests to skip
    nodes,
    slots,
    most,
    halvings,
    vocabulary,
    chunks,
    TINY: tl.constexpr,
    ROUNDING: tl.constexpr,
    RULE: tl.constexpr,
    STEPS: tl.constexpr,
    PADDED_STEPS: tl.constexpr,  # a power of two, as the next two
    PADDED_NODES: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BELOW_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    if tl.load(selected + request) == 0:
        return
    p += request * vocabulary
    q += request * vocabulary
    sums += request * chunks
    index, step_of, chunk = tl.arange(0, PADDED_NODES), tl.arange(0, PADDED_STEPS), tl.arange(0, PADDED_CHUNKS)
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
        order = tl.where(is_child, tl.cumsum(is_child.to(tl.int64), 0), 0)
        count = tl.sum(is_child.to(tl.int64), 0)
        here = request * (nodes + 1) + node + 1
        tl.debug_barrier()  # all threads are done with the last node's
        _write_softmax(p, target + (root + 1 + node) * vocabulary, tl.full([], 1.0, TYPE), vocabulary, BLOCK, TYPE)
        if count > 0:
            read = tl.load(slot + here).to(tl.int64)
            _write_softmax(q, draft + (batch * slots + read) * vocabulary, draft_temp, vocabulary, BLOCK, TYPE)
        tl.debug_barrier()
        token = accepted_child(
            p, q, token_of, order, count, tl.load(planned + here), most, halvings, stream, vocabulary,
            TINY, ROUNDING, RULE, BLOCK,
        )  # fmt: skip
        if token < 0:
            tl.debug_barrier()
            _write_sums(sums, p, vocabulary, chunks, CHUNK, BLOCK)
            tl.debug_barrier()
            left = tl.load(sums + chunk, mask=chunk < chunks, other=0.0)
            nothing = tl.full([1], -1, tl.int64)
            token, _, _ = pick(p, left, nothing, uniform(stream, 3), vocabulary, chunks, CHUNK, BELOW_ONE)
        child = tl.min(tl.where(is_child & (token_of == token), index, PADDED_NODES), 0).to(tl.int64)
        going = (child < PADDED_NODES).to(tl.int32)
        node = tl.where(going != 0, child, -1)
        path = tl.where(step_of == depth, token, path)
        path_nodes = tl.where(step_of == depth, node, path_nodes)
        depth += 1
    tl.store(tokens_out + request * STEPS + step_of, path, mask=step_of < STEPS)
    tl.store(nodes_out + request * STEPS + step_of, path_nodes, mask=step_of < STEPS)


class RejectionInputs(NamedTuple):
    """Logits of both models, and the rows of each request and node."""

    target: Tensor  # [rows, V]
    root_row: Tensor  # [R]: the row of each root; the rows of its nodes follow
    draft: Tensor  # [B, S, V]
    place: Tensor  # [R] in the draft's batch
    slot: Tensor  # [R, 1 + N]: as in `Frontier`, the root first; any for a node without children
    planned: Tensor  # [R, 1 + N] children planned for the root (first) and each node
    temperature: Tensor  # [B], draft temperature


def rejection_walk(
    tree: TreeBatch,
    rule: Draw,
    inputs: RejectionInputs,
    rng: FusedRNG,
    *,
    levels: int,
    most: int,
    active: Tensor | None = None,
) -> Accepted:
    """Walk like `acceptance.walk` with one of the `REJECTION_RULES`.

    Args:
        most: upper bound of the children planned for a node.
        active: [R] bool; the results of the others are undefined. None: all.
    """
    requests, nodes = tree.tokens.shape
    target, draft = inputs.target.contiguous(), inputs.draft.contiguous()
    vocabulary = target.shape[1]
    chunks = triton.cdiv(vocabulary, CHUNK)
    wide = torch.promote_types(target.dtype, torch.float32)
    p, q = (target.new_empty(requests, vocabulary, dtype=wide) for _ in range(2))
    sums = target.new_empty(requests, chunks, dtype=torch.float64)
    shape = requests, levels + 1
    tokens, path = (target.new_empty(shape, dtype=torch.int64) for _ in range(2))
    if active is not None:  # of the others nothing is written
        tokens.fill_(-1)
        path.fill_(-1)
    selected = inputs.place.new_ones(requests, dtype=torch.int8) if active is None else active.to(torch.int8)
    if requests:
        _reject[(requests,)](
            *(tokens, path, p, q, sums, tree.tokens.contiguous(), tree.parent.contiguous(), target),
            *(inputs.root_row.contiguous(), draft, inputs.place.contiguous(), inputs.slot.contiguous()),
            *(inputs.planned.contiguous(), inputs.temperature.contiguous(), rng.key.contiguous(), selected),
            *(nodes, draft.shape[1], most, halvings(most, wide), vocabulary, chunks),
            STEPS=levels + 1,
            PADDED_STEPS=triton.next_power_of_2(levels + 1),
            PADDED_NODES=triton.next_power_of_2(nodes),
            PADDED_CHUNKS=triton.next_power_of_2(chunks),
            CHUNK=CHUNK,
            BELOW_ONE=BELOW_ONE,
            TYPE=tl.float64 if wide == torch.float64 else tl.float32,
            **constants(p, rule),
        )
    return Accepted(tokens, path)
