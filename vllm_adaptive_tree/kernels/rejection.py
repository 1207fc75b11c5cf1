"""RRS and RRSw at one node of each request: one pass over the distributions per rejection."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.acceptance import Children
from vllm_adaptive_tree.acceptance.rejection import rounding_mass
from vllm_adaptive_tree.acceptance.rrs import RRS, RRSw
from vllm_adaptive_tree.acceptance.rule import Draw
from vllm_adaptive_tree.kernels.rng import uniform
from vllm_adaptive_tree.kernels.sampling import FusedRNG
from vllm_adaptive_tree.rng import RandomSource

BLOCK = 4096


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
def _test_child(
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


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["children", "key"])
def _test(
    accepted,  # [R]: -1 if all are rejected
    p,  # [R, V], overwritten with the residual, not normalised
    q,  # [R, V]; unless REPLACED, overwritten with rejected tokens zeroed
    children,  # [R, K]
    key,  # [R]
    count,  # K
    vocabulary,
    TINY: tl.constexpr,
    ROUNDING: tl.constexpr,
    REPLACED: tl.constexpr,  # whether children were drawn with replacement
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p += row * vocabulary
    q += row * vocabulary
    stream = tl.load(key + row)
    token = tl.full([], -1, tl.int64)
    mass = tl.full([], 1.0, tl.float64)  # of p
    rest = tl.full([], 1.0, tl.float64)  # of q
    i = tl.full([], 0, tl.int32)
    while (i < count) & (token < 0):
        x = tl.load(children + row * count + i)
        i += 1
        if x >= 0:
            stays, mass, rest = _test_child(
                p, q, x, uniform(stream, 2 * i), mass, rest, vocabulary, TINY, ROUNDING, REPLACED, BLOCK
            )
            token = tl.where(stays, x, token)
    tl.store(accepted + row, token)


def _rule(replaced: bool) -> Draw:
    def draw(p: Tensor, q: Tensor, children: Children, rng: RandomSource) -> Tensor:
        """Apply the rule of that name; overwrites `p` and `q` [R, V]."""
        assert isinstance(rng, FusedRNG)
        p, q = p.contiguous(), q.contiguous()
        accepted = torch.empty_like(p[:, 0], dtype=torch.int64)
        rng.num_accepts += children.tokens.shape[1]
        if len(p):
            _test[(len(p),)](
                *(accepted, p, q, children.tokens.contiguous(), rng.key.contiguous()),
                *(children.tokens.shape[1], p.shape[1]),
                TINY=torch.finfo(p.dtype).tiny,
                ROUNDING=rounding_mass(p),
                REPLACED=replaced,
                BLOCK=min(BLOCK, triton.next_power_of_2(p.shape[1])),
                num_warps=16,
            )
        return torch.where(accepted >= 0, accepted, rng.sample(p))

    return draw


FUSED_RULES: dict[Draw, Draw] = {RRS.draw: _rule(replaced=True), RRSw.draw: _rule(replaced=False)}
"""Rule -> its kernel version, which overwrites the distributions it is given."""
