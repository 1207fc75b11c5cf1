"""Tests of siblings one by one, RRS and RRSw: one pass over the distributions per rejection."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import triton
import triton.language as tl

from vllm_adaptive_tree.kernels.rng import uniform


@triton.jit
def _subtract(p, p_scale, q, q_scale, x, vocabulary, BLOCK: tl.constexpr, WRITE: tl.constexpr):
    """Mass of (p - q)+, stored over p if WRITE, and the unscaled mass of q without x."""
    mass = tl.zeros([BLOCK], tl.float64)
    rest = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        in_vocab = token < vocabulary
        draft = tl.load(q + token, mask=in_vocab, other=0.0)
        left = tl.maximum(tl.load(p + token, mask=in_vocab, other=0.0) * p_scale - draft * q_scale, 0.0)
        mass += left.to(tl.float64)
        rest += tl.where(token == x, 0.0, draft).to(tl.float64)
        if WRITE:
            tl.store(p + token, left, mask=in_vocab)
    return tl.sum(mass, 0), tl.sum(rest, 0)


@triton.jit
def test_child(
    p,  # [V], overwritten with the residual, not normalised
    q,  # [V]; unless REPLACED, a rejected token is zeroed
    x,
    u,  # uniform
    mass,  # of p
    rest,  # of q
    vocabulary,
    TINY: tl.constexpr,
    ROUNDING: tl.constexpr,
    REPLACED: tl.constexpr,  # whether children were drawn with replacement
    BLOCK: tl.constexpr,
):
    """Test the child x. Returns whether it is accepted, and the masses after the test."""
    p_x = tl.load(p + x).to(tl.float64) / mass
    q_x = tl.load(q + x).to(tl.float64) / rest
    accepted = u < tl.where(q_x > 0, p_x / tl.where(q_x > 0, q_x, 1.0), tl.where(p_x > 0, 1.0, 0.0))
    if accepted == 0:
        p_scale, q_scale = (1 / mass).to(p.dtype.element_ty), (1 / rest).to(p.dtype.element_ty)
        tl.debug_barrier()  # all threads have read p(x) and q(x)
        if q_x > 0:
            left, others = _subtract(p, p_scale, q, q_scale, x, vocabulary, BLOCK, True)
            accepted = left <= ROUNDING  # p is q: the rejection was rounding error
        else:  # x cannot come from q; if p is q, it is skipped
            left, others = _subtract(p, p_scale, q, q_scale, x, vocabulary, BLOCK, False)
            if left > ROUNDING:
                left, others = _subtract(p, p_scale, q, q_scale, x, vocabulary, BLOCK, True)
            else:
                left = mass
        mass = tl.maximum(left, TINY)
        if not REPLACED:
            tl.store(q + x, 0.0)
            rest = tl.maximum(others, TINY)
        tl.debug_barrier()
    return accepted, mass, rest


@triton.jit
def ratio(mass, of):
    """min(1, mass / of); 0 / 0 is 0."""
    return tl.where(of > 0, tl.minimum(mass / tl.where(of > 0, of, 1.0), 1.0), (mass > 0).to(tl.float64))


@triton.jit
def nth(token_of, order, i):
    """Token of the i-th child; the first is 1."""
    return tl.sum(tl.where(order == i, token_of, 0), 0)


@triton.jit
def one_by_one(
    p,
    q,
    token_of,
    order,
    count,
    stream,
    vocabulary,
    TINY: tl.constexpr,
    ROUNDING: tl.constexpr,
    REPLACED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RRS and RRSw. Returns the accepted child, or -1 and leaves the residual in `p`."""
    token = tl.full([], -1, tl.int64)
    mass = tl.full([], 1.0, tl.float64)  # of p
    rest = tl.full([], 1.0, tl.float64)  # of q
    i = tl.full([], 0, tl.int64)
    while (i < count) & (token < 0):
        i += 1
        x, u = nth(token_of, order, i), uniform(stream, 2 * i)
        accepted, mass, rest = test_child(p, q, x, u, mass, rest, vocabulary, TINY, ROUNDING, REPLACED, BLOCK)
        token = tl.where(accepted, x, token)
    return token
