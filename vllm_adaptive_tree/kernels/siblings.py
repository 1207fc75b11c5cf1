"""Recursive rejection at one node of each request: as many passes over a law as there are rejections."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.acceptance import Children
from vllm_adaptive_tree.acceptance.legality import Draw
from vllm_adaptive_tree.acceptance.rejection import rounding_mass
from vllm_adaptive_tree.acceptance.rrs import rrs, rrsw
from vllm_adaptive_tree.kernels.draws import FusedRNG
from vllm_adaptive_tree.kernels.uniform import uniform
from vllm_adaptive_tree.rng import RandomSource

BLOCK = 4096


@triton.jit
def _subtract(p, p_scale, q, q_scale, x, vocabulary, BLOCK: tl.constexpr, WRITE: tl.constexpr):
    """The mass of (p - q)+, which takes p's place if WRITE, and that of q without x, not scaled."""
    mass = tl.zeros([BLOCK], tl.float64)
    rest = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < vocabulary
        drawn = tl.load(q + token, mask=there, other=0.0)
        left = tl.maximum(tl.load(p + token, mask=there, other=0.0) * p_scale - drawn * q_scale, 0.0)
        mass += left.to(tl.float64)
        rest += tl.where(token == x, 0.0, drawn).to(tl.float64)
        if WRITE:
            tl.store(p + token, left, mask=there)
    return tl.sum(mass, 0), tl.sum(rest, 0)


@triton.jit
def _test(
    accepted,  # [R]: -1 where all are rejected
    p,  # [R, V], in the end what the rejections leave of it, not normalised
    q,  # [R, V]; REPLACED: in the end without the rejected tokens
    children,  # [R, K]
    key,  # [R]
    count,  # K
    vocabulary,
    TINY: tl.constexpr,
    ROUNDING: tl.constexpr,
    REPLACED: tl.constexpr,  # children were drawn with replacement
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p += row * vocabulary
    q += row * vocabulary
    place = tl.load(key + row)
    token = tl.full([], -1, tl.int64)
    mass = tl.full([], 1.0, tl.float64)  # of p
    rest = tl.full([], 1.0, tl.float64)  # of q
    i = tl.full([], 0, tl.int32)
    while (i < count) & (token < 0):
        x = tl.load(children + row * count + i)
        i += 1
        if x >= 0:
            p_x = tl.load(p + x).to(tl.float64) / mass
            q_x = tl.load(q + x).to(tl.float64) / rest
            ratio = tl.where(q_x > 0, p_x / tl.where(q_x > 0, q_x, 1.0), tl.where(p_x > 0, 1.0, 0.0))
            if uniform(place, 2 * i) < ratio:
                token = x
            else:
                p_scale, q_scale = (1 / mass).to(p.dtype.element_ty), (1 / rest).to(p.dtype.element_ty)
                tl.debug_barrier()  # all have read p(x) and q(x)
                if q_x > 0:
                    left, others = _subtract(p, p_scale, q, q_scale, x, vocabulary, BLOCK, True)
                    if left <= ROUNDING:  # p is q: the coin was rounding
                        token = x
                else:  # x cannot come from q; where p is q, it is passed over
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
    tl.store(accepted + row, token)


def _rule(replaced: bool) -> Draw:
    def draw(p: Tensor, q: Tensor, children: Children, rng: RandomSource) -> Tensor:
        """As the rule of that name; `p` and `q` [R, V] are used up."""
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


FUSED: dict[Draw, Draw] = {rrs: _rule(replaced=True), rrsw: _rule(replaced=False)}
"""The kernel of a rule, which uses up the laws that it is given."""
