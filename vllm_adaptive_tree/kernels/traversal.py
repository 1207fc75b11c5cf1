"""Traversal verification, one program per request: a rejected leaf costs one pass over two distributions. Among drawn
children it knows chosen ones."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted, Kind
from vllm_adaptive_tree.acceptance.rejection import rounding_mass
from vllm_adaptive_tree.kernels.rng import mix, uniform
from vllm_adaptive_tree.kernels.sampling import FusedRNG
from vllm_adaptive_tree.trees import TreeBatch

BLOCK = 4096
SCRATCH = 1 << 30
"""Bytes of the residuals of p and q along the paths that are held at once."""
TRAVERSAL_KINDS: tuple[Kind, ...] = ("without_replacement", "iid")
"""Kinds of children that the kernel supports."""


@triton.jit
def _at(vector, index, place):
    return tl.sum(tl.where(index == place, vector, 0), 0)


@triton.jit
def _norm(logits, temperature, vocabulary, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    """Maximum of a row's scaled logits, and the sum of exp(scaled - maximum)."""
    peak = tl.full([], -1e30, TYPE)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        scaled = tl.load(logits + token, mask=token < vocabulary, other=float("-inf")).to(TYPE) / temperature
        higher = tl.maximum(peak, tl.max(scaled, 0))
        total = total * tl.exp(peak - higher) + tl.exp(scaled - higher)
        peak = higher
    return peak, tl.sum(total, 0)


@triton.jit
def _entries(touched, left, mass, logits, temperature, peak, total, token, in_vocab, TYPE: tl.constexpr):
    """Entries of the residual if `touched`, else of softmax(logits / temperature)."""
    if touched != 0:
        entries = tl.load(left + token, mask=in_vocab, other=0.0).to(TYPE) / mass.to(TYPE)
    else:
        scaled = tl.load(logits + token, mask=in_vocab, other=float("-inf")).to(TYPE) / temperature
        entries = tl.exp(scaled - peak) / total.to(TYPE)
    return entries


@triton.jit(
    do_not_specialize=["nodes", "steps"],
    do_not_specialize_on_alignment=["tokens", "parent", "chosen", "root_row", "draft_row", "key", "selected"],
)
def _traverse(
    path_out,  # [R, LEVELS]: the accepted nodes, -1 pads
    end_out,  # [R]: the step of acceptance
    probs_out,  # [R, V]: the target's residual after the accepted path, not normalised
    p_left,  # [R, LEVELS, V] scratch: residuals of p along the path
    q_left,  # [R, LEVELS, V] scratch: the same of q
    tokens,  # [R, N]
    parent,  # [R, N]
    chosen,  # [R, N] int8; anything if not MIXED
    target,  # [rows, V] logits
    root_row,  # [R]: the row of each root
    draft,  # [rows, V] logits
    draft_row,  # [R, 1 + N]: the draft's row of each node, the root first
    temperature,  # [R]
    key,  # [R]
    selected,  # [R]: 0 for requests to skip
    nodes,
    steps,
    vocabulary,
    TINY: tl.constexpr,
    ROUNDING: tl.constexpr,
    REPLACED: tl.constexpr,  # whether children were drawn with replacement
    MIXED: tl.constexpr,  # whether some nodes are chosen
    LEVELS: tl.constexpr,
    PADDED_LEVELS: tl.constexpr,  # a power of two above LEVELS
    PADDED_NODES: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    if tl.load(selected + request) == 0:
        return
    p_left += request * LEVELS * vocabulary
    q_left += request * LEVELS * vocabulary
    draft_temp = tl.load(temperature + request).to(TYPE)
    one = tl.full([], 1.0, TYPE)
    root = tl.load(root_row + request).to(tl.int64)
    place = tl.load(key + request)
    slot, level = tl.arange(0, PADDED_NODES), tl.arange(0, PADDED_LEVELS)
    token_of = tl.load(tokens + request * nodes + slot, mask=slot < nodes, other=-1)
    parent_of = tl.load(parent + request * nodes + slot, mask=slot < nodes, other=-2)
    is_chosen = tl.zeros([PADDED_NODES], tl.int32)
    if MIXED:
        is_chosen = tl.load(chosen + request * nodes + slot, mask=slot < nodes, other=0).to(tl.int32)

    # One entry per depth of the path.
    path = tl.full([PADDED_LEVELS], -1, tl.int64)
    deleted = tl.zeros([PADDED_LEVELS], tl.int64)  # number of deleted children
    chance = tl.full([PADDED_LEVELS], 1.0, tl.float64)  # of accepting
    touched = tl.zeros([PADDED_LEVELS], tl.int32)  # p and q are in the scratch
    p_mass = tl.full([PADDED_LEVELS], 1.0, tl.float64)
    q_mass = tl.full([PADDED_LEVELS], 1.0, tl.float64)
    p_peak = tl.zeros([PADDED_LEVELS], TYPE)
    q_peak = tl.zeros([PADDED_LEVELS], TYPE)
    p_total = tl.zeros([PADDED_LEVELS], tl.float64)  # 0: not computed yet
    q_total = tl.zeros([PADDED_LEVELS], tl.float64)

    depth = tl.full([], 0, tl.int64)
    end = tl.full([], -1, tl.int64)
    step = tl.full([], 0, tl.int64)
    while (step < steps) & (end < 0):
        node = _at(path, level, depth)
        children = (parent_of == node) & (token_of >= 0)
        next_one = children & (tl.cumsum(children.to(tl.int64), 0) == _at(deleted, level, depth) + 1)
        if tl.max(next_one.to(tl.int32), 0) != 0:  # down
            x = tl.sum(tl.where(next_one, token_of, 0), 0)
            p_row = target + (root + 1 + node) * vocabulary
            q_row = draft + tl.load(draft_row + request * (nodes + 1) + node + 1) * vocabulary
            here = level == depth
            if _at(p_total, level, depth) == 0:
                peak, total = _norm(p_row, one, vocabulary, BLOCK, TYPE)
                p_peak, p_total = tl.where(here, peak, p_peak), tl.where(here, total, p_total)
                peak, total = _norm(q_row, draft_temp, vocabulary, BLOCK, TYPE)
                q_peak, q_total = tl.where(here, peak, q_peak), tl.where(here, total, q_total)
            used = _at(touched, level, depth)
            p_x = _entries(
                used, p_left + depth * vocabulary, _at(p_mass, level, depth), p_row, one,
                _at(p_peak, level, depth), _at(p_total, level, depth), x, x >= 0, TYPE,
            ).to(tl.float64)  # fmt: skip
            q_x = _entries(
                0 if REPLACED else used, q_left + depth * vocabulary, _at(q_mass, level, depth), q_row, draft_temp,
                _at(q_peak, level, depth), _at(q_total, level, depth), x, x >= 0, TYPE,
            ).to(tl.float64)  # fmt: skip
            if MIXED:
                q_x = tl.where(tl.sum(tl.where(next_one, is_chosen, 0), 0) != 0, 1.0, q_x)
            reach = _at(chance, level, depth) * p_x
            reach = tl.where(q_x > 0, tl.minimum(reach / tl.where(q_x > 0, q_x, 1.0), 1.0), (reach > 0).to(tl.float64))
            depth += 1
            here = level == depth
            path = tl.where(here, tl.sum(tl.where(next_one, slot, 0), 0).to(tl.int64), path)
            chance = tl.where(here, reach, chance)
            deleted, touched = tl.where(here, 0, deleted), tl.where(here, 0, touched)
            p_mass, q_mass = tl.where(here, 1.0, p_mass), tl.where(here, 1.0, q_mass)
            p_total = tl.where(here, 0.0, p_total)
        else:  # a leaf
            coin = uniform(mix(place.to(tl.uint64) + mix(step.to(tl.uint64))).to(tl.int64), 2)
            if (depth == 0) | (coin < _at(chance, level, depth)):
                end = step
            else:
                x, was_chosen = tl.sum(tl.where(slot == node, token_of, 0), 0), _at(is_chosen, slot, node)
                depth -= 1
                above = _at(path, level, depth)
                here = level == depth
                used, accepted = _at(touched, level, depth), _at(chance, level, depth)
                p_row = target + (root + 1 + above) * vocabulary
                q_row = draft + tl.load(draft_row + request * (nodes + 1) + above + 1) * vocabulary
                p_own, q_own = p_left + depth * vocabulary, q_left + depth * vocabulary
                mass = tl.zeros([BLOCK], tl.float64)
                rest = tl.zeros([BLOCK], tl.float64)
                tl.debug_barrier()
                for start in range(0, vocabulary, BLOCK):
                    token = start + tl.arange(0, BLOCK)
                    in_vocab = token < vocabulary
                    p = _entries(
                        used, p_own, _at(p_mass, level, depth), p_row, one,
                        _at(p_peak, level, depth), _at(p_total, level, depth), token, in_vocab, TYPE,
                    )  # fmt: skip
                    q = _entries(
                        0 if REPLACED else used, q_own, _at(q_mass, level, depth), q_row, draft_temp,
                        _at(q_peak, level, depth), _at(q_total, level, depth), token, in_vocab, TYPE,
                    )  # fmt: skip
                    law = q  # that x was drawn from
                    if MIXED:
                        law = tl.where(was_chosen != 0, (token == x).to(TYPE), q)
                    left = tl.maximum(p * accepted.to(TYPE) - law, 0.0)
                    tl.store(p_own + token, left, mask=in_vocab)
                    mass += left.to(tl.float64)
                    if not REPLACED:
                        q = tl.where(token == x, 0.0, q)
                        tl.store(q_own + token, q, mask=in_vocab)
                        rest += q.to(tl.float64)
                left_over = tl.sum(mass, 0)
                kept = tl.where(left_over <= ROUNDING, 0.0, left_over)
                if (kept == 0) & (depth == 0):  # p was q: the rejection was rounding error
                    tl.debug_barrier()
                    for start in range(0, vocabulary, BLOCK):
                        token = start + tl.arange(0, BLOCK)
                        p = tl.load(p_row + token, mask=token < vocabulary, other=float("-inf")).to(TYPE)
                        p = tl.exp(p - _at(p_peak, level, depth))
                        tl.store(p_own + token, p, mask=token < vocabulary)
                    left_over = _at(p_total, level, depth)
                tl.debug_barrier()
                lost = kept + 1 - accepted
                again = tl.where(lost > 0, kept / tl.where(lost > 0, lost, 1.0), 0.0)
                chance = tl.where(here & (depth > 0), again, chance)
                p_mass = tl.where(here, tl.maximum(left_over, TINY), p_mass)
                if not REPLACED:
                    q_mass = tl.where(here, tl.maximum(tl.sum(rest, 0), TINY), q_mass)
                touched = tl.where(here, 1, touched)
                deleted = tl.where(here, deleted + 1, deleted)
        step += 1

    tl.store(end_out + request, end)
    inner = (level >= 1) & (level <= depth)
    tl.store(path_out + request * LEVELS + level - 1, tl.where(inner, path, -1), mask=(level >= 1) & (level <= LEVELS))
    used, mass = _at(touched, level, depth), _at(p_mass, level, depth)
    p_row = target + (root + 1 + _at(path, level, depth)) * vocabulary
    peak, total = _at(p_peak, level, depth), _at(p_total, level, depth)
    if total == 0:
        peak, total = _norm(p_row, one, vocabulary, BLOCK, TYPE)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        in_vocab = token < vocabulary
        p = _entries(used, p_left + depth * vocabulary, mass, p_row, one, peak, total, token, in_vocab, TYPE)
        tl.store(probs_out + request * vocabulary + token, p, mask=in_vocab)


class TraversalInputs(NamedTuple):
    """Logits of both models, and the rows of each request and node."""

    target: Tensor  # [rows, V]
    root_row: Tensor  # [R]: the row of each root; the rows of its nodes follow
    draft: Tensor  # [rows, V]
    draft_row: Tensor  # [R, 1 + N]: the draft's row of each node, the root first; any row for a node without children
    temperature: Tensor  # [R], draft temperature
    chosen: Tensor | None = None  # [R, N] bool: nodes without a draw; None: there is none


def requests_at_once(levels: int, vocabulary: int, size: int) -> int:
    """Requests whose residuals, of numbers of `size` bytes, fit the scratch; a multiple of 4, so that the parts of
    tensors are aligned as the whole."""
    return max(SCRATCH // (2 * levels * vocabulary * size) // 4 * 4, 4)


def traversal(
    tree: TreeBatch, kind: Kind, inputs: TraversalInputs, rng: FusedRNG, *, levels: int, active: Tensor | None = None
) -> Accepted:
    """Verify like `acceptance.traversal`, for children of one of the `TRAVERSAL_KINDS`."""
    requests, slots = tree.tokens.shape
    target, vocabulary = inputs.target.contiguous(), inputs.target.shape[1]
    path = torch.full((requests, levels), -1, device=target.device)
    end = torch.zeros_like(path[:, 0])
    probs = target.new_ones(requests, vocabulary, dtype=torch.promote_types(target.dtype, torch.float32))
    chunk = requests_at_once(levels, vocabulary, probs.element_size())
    p_left, q_left = (probs.new_empty(min(chunk, requests), levels, vocabulary) for _ in range(2))
    if active is None:
        active = torch.ones_like(end, dtype=torch.bool)
    draft = inputs.draft.contiguous()
    selected = active.to(torch.int8)
    chosen = selected if inputs.chosen is None else inputs.chosen.to(torch.int8)
    by_request = (
        *(tree.tokens, tree.parent, chosen, inputs.root_row, inputs.draft_row, inputs.temperature, rng.key),
        selected,
    )
    for begin in range(0, requests, chunk):
        here = slice(begin, begin + chunk)
        *columns, root_row, draft_row, temperature, key, selected = (part.contiguous()[here] for part in by_request)
        _traverse[(len(key),)](
            *(path[here], end[here], probs[here], p_left, q_left, *columns, target, root_row, draft, draft_row),
            *(temperature, key, selected),
            *(slots, 2 * slots + 1, vocabulary),
            TINY=torch.finfo(probs.dtype).tiny,
            ROUNDING=rounding_mass(probs),
            REPLACED=kind == "iid",
            MIXED=inputs.chosen is not None,
            LEVELS=levels,
            PADDED_LEVELS=triton.next_power_of_2(levels + 1),
            PADDED_NODES=triton.next_power_of_2(slots),
            BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)),
            TYPE=tl.float64 if probs.dtype == torch.float64 else tl.float32,
            num_warps=16,
        )
    bonus = rng.fold_in(end).sample(probs)[:, None]
    depth = (path >= 0).sum(1, keepdim=True)
    level = torch.arange(levels + 1, device=path.device)
    nodes = torch.nn.functional.pad(path, (0, 1), value=-1)
    tokens = tree.tokens.gather(1, nodes.clamp(min=0)).masked_fill(nodes < 0, -1)
    return Accepted(torch.where(level == depth, bonus, tokens), nodes)
