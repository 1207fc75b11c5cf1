"""Testing siblings in turn (speculative sampling for adapted proposals): what every top-down rule is made of."""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.rng import RandomSource


class Children(NamedTuple):
    """The children of one node of each request, in the order in which they were drawn."""

    tokens: Tensor  # [R, K], -1 behind the last
    drawn: Tensor  # [R]: how many the proposer decided to draw; more than there are where the list was cut
    most: int  # no node was to get more


class Round(NamedTuple):
    """Between two tests."""

    token: Tensor  # [R]: the accepted token, -1 while there is none
    p: Tensor  # [R, V]: the target's law given all rejections so far


def begin(p: Tensor) -> Round:
    return Round(torch.full_like(p[:, 0], -1, dtype=torch.int64), p)


def test(before: Round, x: Tensor, d: Tensor, rng: RandomSource) -> Round:
    """Accept x ~ d with probability min(1, p(x) / d(x)); otherwise p becomes norm((p - d)+).

    Rows that have a token, and rows whose x [R] is -1, stay as they are. Where p == d nothing is left to reject into:
    x is accepted, or passed over if it cannot come from d (a greedy request's best tokens).
    """
    token, p = before
    at = x.clamp(min=0)[:, None]
    p_x, d_x = p.gather(1, at)[:, 0], d.gather(1, at)[:, 0]
    residual, mass = subtract(p, d)
    equal = mass <= rounding(p)
    testing = (token < 0) & (x >= 0)
    certain = ~testing | (equal & (d_x > 0))
    coin = rng.accept(torch.where(certain, 1.0, (p_x / d_x).nan_to_num(0.0).clamp(max=1.0)))
    rejected = testing & ~coin & ~equal
    return Round(torch.where(testing & coin, x, token), pick(rejected, residual, p))


def finish(last: Round, rng: RandomSource) -> Tensor:
    """The accepted token, or one drawn from what is left of p."""
    taken = last.token >= 0
    drawn = rng.sample(last.p * ~taken[:, None])  # no choice where there is one
    return torch.where(taken, last.token, drawn)


def subtract(p: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """norm((p - d)+) [R, V], and the mass [R] before normalising."""
    residual = (p - d).clamp_(min=0)
    mass = residual.sum(-1)
    return residual.div_(mass.clamp(min=torch.finfo(p.dtype).tiny)[:, None]), mass


def pick(rows: Tensor, law: Tensor, other: Tensor) -> Tensor:
    """`law` [R, V] in those rows [R] bool, `other` in the rest; `torch.where` is slow when rows share a condition."""
    ours = rows[:, None].to(law.dtype)
    return torch.addcmul(other * (1 - ours), law, ours)


def without(law: Tensor, x: Tensor) -> Tensor:
    """The law [R, V] given that the token is not x [R] (-1: no condition); zeros where nothing else has mass."""
    at = x.clamp(min=0)[:, None]
    rest = law.scatter(1, at, torch.where((x < 0)[:, None], law.gather(1, at), 0.0))
    return rest.div_(rest.sum(-1, keepdim=True).clamp(min=torch.finfo(law.dtype).tiny))


def one_hot(x: Tensor, like: Tensor) -> Tensor:
    """[R] tokens -> [R, V], `like` giving V and the dtype."""
    return torch.zeros_like(like).scatter(1, x.clamp(min=0)[:, None], 1.0)


def rounding(p: Tensor) -> float:
    """A mass that may be nothing but rounding."""
    return 1e-12 if p.dtype == torch.float64 else 1e-6
