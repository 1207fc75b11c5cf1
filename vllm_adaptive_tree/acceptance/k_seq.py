"""K-SEQ (SpecTr)."""

import math

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance.rejection import Children, TestState, begin, finish, where_rows
from vllm_adaptive_tree.acceptance.rule import Rule
from vllm_adaptive_tree.rng import RandomSource

HALVINGS = 40


class KSeq(Rule):
    """Children drawn independently from q, each accepted with min(1, p / (rho q)) (SpecTr, arXiv 2310.15141).

    rho solves 1 - (1 - b)^k = rho b with b = sum min(p / rho, q), for the actual number of children k. The upper end of
    the bisection is lossless even if it is not exact.
    """

    kinds = ("iid",)

    @staticmethod
    def draw(p: Tensor, q: Tensor, children: Children, rng: RandomSource) -> Tensor:
        k = (children.tokens >= 0).sum(1).to(p.dtype)
        low, high = torch.ones_like(k), k.clamp(min=1)
        kept = torch.empty_like(p)  # accepted mass of one test, per token
        for _ in range(halvings(children.tokens.shape[1], p.dtype)):
            rho = (low + high) / 2
            b = torch.minimum(torch.div(p, rho[:, None], out=kept), q, out=kept).sum(-1)
            above = 1 - (1 - b).clamp(min=0) ** k <= rho * b
            low, high = torch.where(above, low, rho), torch.where(above, rho, high)
        torch.minimum(torch.div(p, high[:, None], out=kept), q, out=kept)
        b = kept.sum(-1)
        tests = torch.where(b > 0, (1 - (1 - b).clamp(min=0) ** k) / b.clamp(min=torch.finfo(p.dtype).tiny), k)
        residual = torch.addcmul(p, kept, tests[:, None], value=-1).clamp_(min=0)
        token = begin(p).token
        for x in children.tokens.unbind(1):
            at = x.clamp(min=0)[:, None]
            ratio = (kept.gather(1, at) / q.gather(1, at))[:, 0].nan_to_num(0.0).clamp(max=1.0)
            testing = (token < 0) & (x >= 0)
            token = torch.where(rng.accept(torch.where(testing, ratio, 1.0)) & testing, x, token)
        return finish(TestState(token, where_rows(residual.sum(-1) > 0, residual, p)), rng)


def halvings(children: int, dtype: torch.dtype) -> int:
    """Steps of the bisection for so many children: until the interval is as small as numbers of that type can tell."""
    width = max(children, 1) / torch.finfo(dtype).eps
    return min(HALVINGS, math.ceil(math.log2(width)))
