"""SpecHub and greedy multi-draft: a few passes over the distributions of a node."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import triton
import triton.language as tl

from vllm_adaptive_tree.kernels.rejection import nth, ratio, test_child
from vllm_adaptive_tree.kernels.rng import uniform


@triton.jit
def _argmax(q, vocabulary, BLOCK: tl.constexpr):
    """Token of the largest entry, the first of equals."""
    best, largest = tl.full([], 0, tl.int64), tl.full([], float("-inf"), q.dtype.element_ty)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        entry = tl.load(q + token, mask=token < vocabulary, other=float("-inf"))
        top = tl.max(entry, 0)
        at = tl.min(tl.where(entry == top, token, vocabulary), 0).to(tl.int64)
        best = tl.where(top > largest, at, best)
        largest = tl.maximum(top, largest)
    return best


@triton.jit
def _joint(draft, token, hub, q_hub, beside, certain):
    """Q(hub, token): the mass of q(hub), in proportion to the `draft`'s entries of the other tokens, whose sum is
    `beside`, or all of it on the token that is `certain` (-1: on none)."""
    shared = tl.where(token == hub, 0.0, draft) / beside * q_hub
    return tl.where(certain >= 0, tl.where(token == certain, q_hub, 0.0), shared)


@triton.jit
def spechub(
    p,
    q,
    token_of,
    order,
    count,
    stream,
    vocabulary,
    TINY: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """SpecHub, as in `acceptance.hub`. Returns the accepted child, or -1 and leaves the residual in `p`."""
    token = tl.full([], -1, tl.int64)
    first, second = nth(token_of, order, 1), nth(token_of, order, 2)
    if count == 1:
        one = tl.full([], 1.0, tl.float64)
        u = uniform(stream, 2)
        accepted, _, _ = test_child(p, q, first, u, one, one, vocabulary, TINY, ROUNDING, True, BLOCK)
        token = tl.where(accepted, first, token)
    if count > 1:
        hub = _argmax(q, vocabulary, BLOCK)
        off = tl.zeros([BLOCK], tl.float64)  # mass of q beside the hub
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            off += tl.load(q + at, mask=(at < vocabulary) & (at != hub), other=0.0).to(tl.float64)
        p_hub, q_hub, total = tl.load(p + hub).to(tl.float64), tl.load(q + hub), tl.sum(off, 0)
        certain = tl.where(total > 0, -1, (hub == 0).to(tl.int64))
        beside = tl.maximum(total, TINY).to(q.dtype.element_ty)

        hub_first = first == hub
        x = tl.where(hub_first, second, first)
        p_x, q_x = tl.load(p + x), tl.load(q + x)
        left = tl.where(hub_first, tl.maximum(p_x - q_x, 0.0), p_x).to(tl.float64)
        prob = tl.where(hub_first, _joint(q_x, x, hub, q_hub, beside, certain), q_x).to(tl.float64)
        token = tl.where(uniform(stream, 4) < ratio(left, prob), x, token)
        if token < 0:
            over = tl.zeros([BLOCK], tl.float64)  # mass of (hub, x) left after the test of x
            other = tl.zeros([BLOCK], tl.float64)  # mass of (x, hub) left after it
            rest = tl.zeros([BLOCK], tl.float64)
            tl.debug_barrier()  # all threads have read the entries of x and the hub
            for start in range(0, vocabulary, BLOCK):
                at = start + tl.arange(0, BLOCK)
                known = at < vocabulary
                target, draft = tl.load(p + at, mask=known, other=0.0), tl.load(q + at, mask=known, other=0.0)
                joint = _joint(draft, at, hub, q_hub, beside, certain)
                p_1 = tl.where(at == hub, target, tl.maximum(target - draft, 0.0))
                p_2 = tl.where(at == hub, 0.0, tl.maximum(p_1 - joint, 0.0))
                over += tl.maximum(joint - p_1, 0.0).to(tl.float64)
                other += tl.where(at == hub, 0.0, tl.maximum(draft - target, 0.0)).to(tl.float64)
                rest += p_2.to(tl.float64)
                tl.store(p + at, p_2, mask=known)
            tl.debug_barrier()
            lost = tl.sum(over, 0)
            hub_left = tl.where(hub_first, p_hub, tl.maximum(p_hub - lost, 0.0))
            chance = ratio(hub_left, tl.where(hub_first, lost, tl.sum(other, 0)))
            chance = tl.where(tl.sum(rest, 0) <= ROUNDING, 1.0, chance)  # no residual is left
            token = tl.where(uniform(stream, 6) < chance, hub, token)
    return token


@triton.jit
def greedy_multi_draft(
    p,
    q,
    token_of,
    order,
    count,
    planned,
    most,
    stream,
    vocabulary,
    TINY: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Greedy multi-draft, as in `acceptance.hub`; overwrites `q`. Returns the accepted child, or -1 and leaves the
    residual in `p`."""
    token = tl.full([], -1, tl.int64)
    if count > 0:
        for _ in range(tl.minimum(planned, most) - 1):
            best = _argmax(q, vocabulary, BLOCK)
            tl.debug_barrier()
            tl.store(q + best, -1.0)  # marks it
            tl.debug_barrier()
        total = tl.zeros([BLOCK], tl.float64)
        other = tl.full([], 0, tl.int64) + vocabulary  # the first token that is not marked
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            draft = tl.load(q + at, mask=at < vocabulary, other=-1.0)
            other = tl.minimum(other, tl.min(tl.where(draft >= 0, at, vocabulary), 0).to(tl.int64))
            draft = tl.maximum(draft, 0.0)
            total += draft.to(tl.float64)
            tl.store(q + at, draft, mask=at < vocabulary)
        rest = tl.sum(total, 0)
        tl.debug_barrier()
        if rest <= 0:
            tl.store(q + tl.minimum(other, vocabulary - 1), 1.0)
            rest += 1.0
        tl.debug_barrier()
        x, u = nth(token_of, order, 1), uniform(stream, 2)
        one = tl.full([], 1.0, tl.float64)
        accepted, _, _ = test_child(p, q, x, u, one, rest, vocabulary, TINY, ROUNDING, True, BLOCK)
        token = tl.where(accepted, x, token)
    return token
