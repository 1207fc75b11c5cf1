"""Continuations of texts merged into the trees of a batch in one launch."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.drafters.lookup import Continuations
from vllm_adaptive_tree.kernels.growth import _before, rivals_at_a_time
from vllm_adaptive_tree.proposers.base import Proposal
from vllm_adaptive_tree.proposers.merging import GOES_ON, Merged
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY

MOST_CHAINS = 31
"""Continuations of a request: a node has a bit for each."""


@triton.jit
def _above(link, value, parent, slot, there, ROUNDS: tl.constexpr, BITS: tl.constexpr):
    """`value` of slots, and of all above them: the smallest, or with `BITS` the bits in common. `link`, `value`:
    scratch with the slots' parents, and with their values."""
    own, above = tl.load(value + slot, mask=there, other=0), parent
    for _ in range(ROUNDS):  # twice as far up each time
        tl.store(link + slot, above, mask=there)
        tl.store(value + slot, own, mask=there)
        tl.debug_barrier()
        has = there & (above >= 0)
        if BITS:
            own &= tl.load(value + above, mask=has, other=-1)
        else:
            own = tl.minimum(own, tl.load(value + above, mask=has, other=float("inf")))
        above = tl.load(link + above, mask=has, other=-1)
        tl.debug_barrier()
    tl.store(value + slot, own, mask=there)
    tl.debug_barrier()
    return own


@triton.jit(do_not_specialize=["nodes", "size", "most"], do_not_specialize_on_alignment=["own_draws"])
def _merge(
    tokens_out,  # [R, N], as the next seven
    parent_out,
    depth_out,
    value_out,
    read_out,
    cell_out,
    chosen_out,
    level_out,
    planned_out,  # [R, 1 + N]
    integers,  # [R, 4, S] scratch, as the next
    numbers,  # [R, S]
    tokens,  # [R, D], as the next five
    parent,
    depth,
    value,
    read,
    cell,
    planned,  # [R, 1 + D]
    chains,  # [R, M, K]
    weight,  # [R, M]
    own_draws,  # [R] int8: 0 for requests whose other children are drawn
    nodes,  # N
    size,  # D
    most,
    CHAINS: tl.constexpr,  # M
    LENGTH: tl.constexpr,  # K
    PADDED_CHAINS: tl.constexpr,  # a power of two, as the next three
    PADDED_LENGTH: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # of S, at least D + M * K
    ROUNDS: tl.constexpr,  # log2 of the levels
    TEXT_ROUNDS: tl.constexpr,  # log2 of K
    LOG_GOES_ON: tl.constexpr,
    DRAFTED: tl.constexpr,  # False: no tree has a node
    LIMITED: tl.constexpr,  # by `most`
    CELLS: tl.constexpr,
    MIXES: tl.constexpr,  # with `own_draws`
    BLOCK: tl.constexpr,  # rivals at a time
    EMPTY: tl.constexpr,
):
    """Slots are the nodes of the draft, then the tokens of every continuation."""
    request, slot = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    integers += request * 4 * PADDED
    link, bits, token_at, known = integers, integers + PADDED, integers + 2 * PADDED, integers + 3 * PADDED
    worth_at = numbers + request * PADDED
    chains += request * CHAINS * LENGTH
    weight += request * CHAINS
    planned += request * (1 + size)
    planned_out += request * (1 + nodes)
    drafted, at, out = slot < size, request * size + slot, request * nodes
    total = size + CHAINS * LENGTH
    used = slot < total

    # nodes of the draft, and the continuations that they are on
    if DRAFTED:
        lane = tl.arange(0, PADDED_SIZE)
        node = request * size + lane
        token = tl.load(tokens + node, mask=lane < size, other=EMPTY)
        above = tl.load(parent + node, mask=lane < size, other=-1).to(tl.int32)
        deep = tl.load(depth + node, mask=lane < size, other=0).to(tl.int32)
        on = tl.zeros([PADDED_SIZE], tl.int32)
        inside = (token != EMPTY) & (deep <= LENGTH)
        for chain in tl.static_range(CHAINS):
            same = tl.load(chains + chain * LENGTH + deep - 1, mask=inside, other=EMPTY) == token
            on |= tl.where(inside & same, tl.where(tl.load(weight + chain) > 0, 1 << chain, 0), 0)
        tl.store(bits + lane, on, mask=lane < size)
        tl.debug_barrier()
        on = _above(link, bits, above, lane, lane < size, TEXT_ROUNDS, True)
        tl.store(known + slot, -1)
        tl.debug_barrier()
        shared = tl.zeros([PADDED_SIZE], tl.float32)
        for chain in tl.static_range(CHAINS):
            passes = (on >> chain) & 1 != 0
            shared += tl.where(passes, tl.load(weight + chain), 0.0)
            tl.store(known + chain * LENGTH + deep - 1, lane, mask=passes)
        worth = tl.load(value + node, mask=lane < size, other=float("-inf")).to(tl.float32)
        worth = tl.where(worth == worth, worth, float("-inf"))  # NaN has no place among the others
        text = tl.log(tl.where(on != 0, shared, 1.0)) + (deep - 1).to(tl.float32) * LOG_GOES_ON
        tl.store(worth_at + lane, tl.where(on != 0, tl.maximum(worth, text), worth), mask=lane < size)
        tl.store(token_at + lane, token.to(tl.int32), mask=lane < size)
        tl.debug_barrier()

    # tokens of the continuations: each is in the tree, or stands in the first continuation with the same prefix
    chain, level = tl.arange(0, PADDED_CHAINS)[:, None], tl.arange(0, PADDED_LENGTH)[None, :]
    there, place = (chain < CHAINS) & (level < LENGTH), chain * LENGTH + level
    token = tl.load(chains + place, mask=there, other=EMPTY)
    own = tl.load(weight + chain, mask=chain < CHAINS, other=0.0)
    alive = there & (own > 0) & (tl.cumsum((token < 0).to(tl.int32), 1) == 0)
    through = tl.zeros([PADDED_CHAINS, PADDED_LENGTH], tl.float32)
    first = tl.full([PADDED_CHAINS, PADDED_LENGTH], CHAINS, tl.int32)
    for other in tl.static_range(CHAINS):
        also = tl.load(chains + other * LENGTH + level, mask=level < LENGTH, other=EMPTY)
        share = tl.load(weight + other)
        same = alive & (tl.cumsum((token != also).to(tl.int32), 1) == 0)
        through += tl.where(same, share, 0.0)
        first = tl.where(same, tl.minimum(first, tl.where(share > 0, other, CHAINS)), first)
    stands = size + first * LENGTH + level
    new = alive & (first == chain)
    if DRAFTED:
        in_tree = tl.load(known + place, mask=there, other=-1)
        stands = tl.where(in_tree >= 0, in_tree, stands)
        new &= in_tree < 0
        tl.debug_barrier()
    tl.store(known + place, tl.where(alive, stands, -1), mask=there)
    text = tl.log(tl.where(new, through, 1.0)) + level.to(tl.float32) * LOG_GOES_ON
    tl.store(worth_at + size + place, tl.where(new, text, float("-inf")), mask=there)
    tl.store(token_at + size + place, tl.where(new, token.to(tl.int32), EMPTY), mask=there)
    tl.debug_barrier()

    # all slots together
    from_text = used & ~drafted
    place = slot - size
    token = tl.load(token_at + slot, mask=used, other=EMPTY)
    above = tl.load(known + place - 1, mask=from_text & (place % LENGTH > 0) & (token != EMPTY), other=-1)
    deep = tl.where(from_text & (token != EMPTY), place % LENGTH + 1, 0)
    had = tl.full([PADDED], float("-inf"), tl.float32)  # value that the draft gave
    if DRAFTED:
        above = tl.where(drafted, tl.load(parent + at, mask=drafted, other=-1).to(tl.int32), above)
        deep = tl.where(drafted, tl.load(depth + at, mask=drafted, other=0).to(tl.int32), deep)
        had = tl.load(value + at, mask=drafted, other=float("-inf")).to(tl.float32)
    worth = _above(link, worth_at, above, slot, used, ROUNDS, False)
    if LIMITED:
        earlier = tl.zeros([PADDED], tl.int32)
        tl.store(link + slot, above, mask=used)
        tl.debug_barrier()
        for start in range(0, total, BLOCK):
            rival = start + tl.arange(0, BLOCK)
            theirs = tl.load(worth_at + rival, mask=rival < total, other=float("-inf"))
            sibling = tl.load(link + rival, mask=rival < total, other=-2)
            before = _before(theirs, worth, rival, slot) & (sibling[None, :] == above[:, None])
            earlier += tl.sum(before.to(tl.int32), 1)
        tl.debug_barrier()
        tl.store(worth_at + slot, tl.where(earlier < most, worth, float("-inf")), mask=used)
        tl.debug_barrier()
        worth = _above(link, worth_at, above, slot, used, ROUNDS, False)
    stays = used & (worth > float("-inf"))

    order = tl.zeros([PADDED], tl.int32)
    for start in range(0, total, BLOCK):
        rival = start + tl.arange(0, BLOCK)
        theirs = tl.load(worth_at + rival, mask=rival < total, other=float("-inf"))
        order += tl.sum((_before(theirs, worth, rival, slot) & (rival < total)[None, :]).to(tl.int32), 1)
    chosen = stays & (worth > had)
    tl.store(known + slot, order, mask=used)
    tl.store(token_at + slot, chosen.to(tl.int32), mask=used)
    tl.store(link + slot, above, mask=used)
    tl.debug_barrier()
    to = tl.load(known + above, mask=stays & (above >= 0), other=-1)
    kept, out = used & (order < nodes), out + order
    tl.store(tokens_out + out, tl.where(stays, token, EMPTY).to(tl.int64), mask=kept)
    tl.store(parent_out + out, to.to(tl.int64), mask=kept)
    tl.store(depth_out + out, tl.where(stays, deep, 0).to(tl.int64), mask=kept)
    tl.store(value_out + out, worth, mask=kept)
    tl.store(chosen_out + out, chosen, mask=kept)
    slots_read, number = tl.full([PADDED], -1, tl.int64), tl.zeros([PADDED], tl.int64)
    counts = tl.full([PADDED], -1, tl.int64)
    needs = tl.zeros([PADDED], tl.int32)  # levels of the draft
    if DRAFTED:
        old = stays & drafted
        slots_read = tl.load(read + at, mask=old, other=-1)
        number = tl.load(planned + 1 + slot, mask=old, other=0)
        on = tl.load(bits + slot, mask=old, other=0)
        needs = tl.where(old & (on == 0), deep, 0)
        if CELLS:
            counts = tl.load(cell + at, mask=old, other=-1)
    if MIXES:
        drawn = tl.load(own_draws + request + slot * 0) == 0
        needs = tl.where(drawn & stays & ~chosen, deep, needs)
        if CELLS:  # after a chosen sibling a drawn node is accepted less often
            after = tl.zeros([PADDED], tl.int32)
            for start in range(0, total, BLOCK):
                rival = start + tl.arange(0, BLOCK)
                sibling = tl.load(link + rival, mask=rival < total, other=-2)
                theirs = tl.load(token_at + rival, mask=rival < total, other=0) != 0
                ahead = tl.load(known + rival, mask=rival < total, other=total)
                before = (ahead[None, :] <= order[:, None]) & (sibling[None, :] == above[:, None])
                after += tl.sum((before & theirs[None, :]).to(tl.int32), 1)
            counts = tl.where(drawn & (after > 0), -1, counts)
    tl.store(read_out + out, slots_read, mask=kept)
    tl.store(planned_out + 1 + order, number, mask=kept)
    tl.store(level_out + out, needs.to(tl.int64), mask=kept)
    if CELLS:
        tl.store(cell_out + out, counts, mask=kept)
    tl.store(planned_out, tl.load(planned))


def merge(
    proposal: Proposal | None,
    continuations: Continuations,
    *,
    nodes: int,
    most: int,
    max_depth: int,
    own_draws: Tensor | None = None,
) -> Merged:
    """Do `merging.merged` in one launch, for trees with float32 values and at most `MOST_CHAINS` continuations.

    Args:
        proposal: None: no tree has a node.
    """
    tokens, weight = (part.contiguous() for part in continuations)
    (requests, count, length), device = tokens.shape, tokens.device
    assert count <= MOST_CHAINS
    given = Proposal.nothing(requests, 0, device) if proposal is None else proposal
    size = given.read.shape[1]
    nodes = min(nodes, size + count * length)
    columns = [torch.empty((requests, nodes), dtype=torch.int64, device=device) for _ in range(6)]
    token, parent, depth, read, cell, level = columns
    value = torch.empty((requests, nodes), dtype=torch.float32, device=device)
    chosen = torch.empty((requests, nodes), dtype=torch.bool, device=device)
    planned = torch.empty((requests, 1 + nodes), dtype=torch.int64, device=device)
    padded = triton.next_power_of_2(size + count * length)
    integers = torch.empty((requests, 4, padded), dtype=torch.int32, device=device)
    numbers = torch.empty((requests, padded), dtype=torch.float32, device=device)
    old = [part.contiguous() for part in (*given.tree, given.read)]
    cells = old[0] if given.cell is None else given.cell.contiguous()
    draws = chosen if own_draws is None else own_draws
    if requests:
        _merge[(requests,)](
            *(token, parent, depth, value, read, cell, chosen, level, planned, integers, numbers),
            *(*old, cells, given.num_planned.contiguous(), tokens, weight, draws.view(torch.int8), nodes, size, most),
            CHAINS=count,
            LENGTH=length,
            PADDED_CHAINS=triton.next_power_of_2(count),
            PADDED_LENGTH=triton.next_power_of_2(length),
            PADDED_SIZE=triton.next_power_of_2(max(1, size)),
            PADDED=padded,
            ROUNDS=max(max_depth, length).bit_length(),
            TEXT_ROUNDS=(length - 1).bit_length(),
            LOG_GOES_ON=math.log(GOES_ON),
            DRAFTED=size > 0,
            LIMITED=most < nodes,
            CELLS=given.cell is not None,
            MIXES=own_draws is not None,
            BLOCK=rivals_at_a_time(padded),
            EMPTY=EMPTY,
            num_warps=4,
        )
    tree = TreeBatch(token, parent, depth, value)
    return Merged(Proposal(tree, read, planned, None if given.cell is None else cell, chosen), level)
