"""K-SEQ: bisection for rho with a pass over both distributions a step."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import triton
import triton.language as tl

from vllm_adaptive_tree.kernels.rejection import nth, ratio
from vllm_adaptive_tree.kernels.rng import uniform


@triton.jit
def _kept(p, q, rho, vocabulary, BLOCK: tl.constexpr):
    """b = sum of min(p / rho, q)."""
    kept = tl.zeros([BLOCK], tl.float64)
    scale = rho.to(p.dtype.element_ty)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        target = tl.load(p + at, mask=at < vocabulary, other=0.0)
        kept += tl.minimum(target / scale, tl.load(q + at, mask=at < vocabulary, other=0.0)).to(tl.float64)
    return tl.sum(kept, 0)


@triton.jit
def _any_of(b, count):
    """1 - (1 - b)^count."""
    none = tl.full([], 1.0, tl.float64)
    for _ in range(count):
        none *= tl.maximum(1.0 - b, 0.0)
    return 1.0 - none


@triton.jit
def _left(p, q, scale, tests, at, known):
    """(p - tests * min(p / scale, q))+ of tokens, `tests` being how often one is kept."""
    target = tl.load(p + at, mask=known, other=0.0)
    kept = tl.minimum(target / scale, tl.load(q + at, mask=known, other=0.0))
    return tl.maximum(target - kept * tests, 0.0)


@triton.jit
def k_seq(p, q, token_of, order, count, halvings, stream, vocabulary, BLOCK: tl.constexpr):
    """K-SEQ, as in `acceptance.k_seq`. Returns the accepted child, or -1 and leaves the residual in `p`."""
    token = tl.full([], -1, tl.int64)
    if count > 0:
        low, rho = tl.full([], 1.0, tl.float64), count.to(tl.float64)
        for _ in range(halvings):
            middle = (low + rho) / 2
            b = _kept(p, q, middle, vocabulary, BLOCK)
            above = _any_of(b, count) <= middle * b
            low, rho = tl.where(above, low, middle), tl.where(above, middle, rho)
        i = tl.full([], 0, tl.int64)
        while (i < count) & (token < 0):
            i += 1
            x = nth(token_of, order, i)
            q_x = tl.load(q + x).to(tl.float64)
            chance = ratio(tl.minimum(tl.load(p + x).to(tl.float64) / rho, q_x), q_x)
            token = tl.where(uniform(stream, 2 * i) < chance, x, token)
        if token < 0:
            b = _kept(p, q, rho, vocabulary, BLOCK)
            tests = tl.where(b > 0, _any_of(b, count) / tl.where(b > 0, b, 1.0), count.to(tl.float64))
            tests, scale = tests.to(p.dtype.element_ty), rho.to(p.dtype.element_ty)
            left = tl.zeros([BLOCK], tl.float64)
            for start in range(0, vocabulary, BLOCK):
                at = start + tl.arange(0, BLOCK)
                left += _left(p, q, scale, tests, at, at < vocabulary).to(tl.float64)
            if tl.sum(left, 0) > 0:
                tl.debug_barrier()  # all threads have read p
                for start in range(0, vocabulary, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    tl.store(p + at, _left(p, q, scale, tests, at, at < vocabulary), mask=at < vocabulary)
            tl.debug_barrier()
    return token
