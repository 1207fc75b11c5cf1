"""Tests of siblings one by one (speculative sampling, Leviathan et al. 2023), the building block of every walk rule."""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.rng import RandomSource


class Children(NamedTuple):
    """The children of one node of each request, in the order in which they were drawn."""

    tokens: Tensor  # [R, K], -1 pads
    num_planned: Tensor  # [R]: children the proposer decided to draw; more than `tokens` has if the tree was truncated
    max_children: int  # upper bound of `num_planned`, on the host


class TestState(NamedTuple):
    """The state between two tests."""

    token: Tensor  # [R]: the accepted token, -1 if none yet
    p: Tensor  # [R, V]: the target distribution given all rejections so far (the residual)


def begin(p: Tensor) -> TestState:
    return TestState(torch.full_like(p[:, 0], -1, dtype=torch.int64), p)


def test(before: TestState, x: Tensor, d: Tensor, rng: RandomSource) -> TestState:
    """Accept x ~ d with probability min(1, p(x) / d(x)); otherwise p becomes norm((p - d)+).

    Requests that have a token, or whose x [R] is -1, are left alone. Where p == d there is no residual: x is accepted,
    or skipped if it cannot come from d (the best tokens of a greedy request).
    """
    token, p = before
    at = x.clamp(min=0)[:, None]
    p_x, d_x = p.gather(1, at)[:, 0], d.gather(1, at)[:, 0]
    residual, mass = positive_part(p, d)
    equal = mass <= rounding_mass(p)
    testing = (token < 0) & (x >= 0)
    certain = ~testing | (equal & (d_x > 0))
    accepted = rng.accept(torch.where(certain, 1.0, (p_x / d_x).nan_to_num(0.0).clamp(max=1.0)))
    rejected = testing & ~accepted & ~equal
    return TestState(torch.where(testing & accepted, x, token), where_rows(rejected, residual, p))


def finish(last: TestState, rng: RandomSource) -> Tensor:
    """The accepted token, or one sampled from the residual."""
    accepted = last.token >= 0
    sampled = rng.sample(last.p * ~accepted[:, None])  # zeros where a token is accepted: nothing to sample
    return torch.where(accepted, last.token, sampled)


def positive_part(p: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """norm((p - d)+) [R, V], and its mass [R] before normalising."""
    residual = (p - d).clamp_(min=0)
    mass = residual.sum(-1)
    return residual.div_(mass.clamp(min=torch.finfo(p.dtype).tiny)[:, None]), mass


def where_rows(rows: Tensor, probs: Tensor, other: Tensor) -> Tensor:
    """`probs` [R, V] where `rows` [R] is true, else `other`; `torch.where` is slow with a broadcast condition."""
    mask = rows[:, None].to(probs.dtype)
    return torch.addcmul(other * (1 - mask), probs, mask)


def without(probs: Tensor, x: Tensor) -> Tensor:
    """`probs` [R, V] conditioned on the token not being x [R] (-1: unconditioned); zeros if only x has mass."""
    at = x.clamp(min=0)[:, None]
    rest = probs.scatter(1, at, torch.where((x < 0)[:, None], probs.gather(1, at), 0.0))
    return rest.div_(rest.sum(-1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny))


def one_hot(x: Tensor, like: Tensor) -> Tensor:
    """[R] tokens -> [R, V], with V and dtype of `like`."""
    return torch.zeros_like(like).scatter(1, x.clamp(min=0)[:, None], 1.0)


def rounding_mass(p: Tensor) -> float:
    """Mass up to which it may be a rounding error."""
    return 1e-12 if p.dtype == torch.float64 else 1e-6
