"""Recursive rejection sampling, with and without replacement."""

from torch import Tensor

from vllm_adaptive_tree.acceptance.rejection import Children, begin, finish, test, without
from vllm_adaptive_tree.acceptance.rule import Rule
from vllm_adaptive_tree.rng import RandomSource


class RRS(Rule):
    """Children drawn independently from q (SpecInfer, arXiv 2305.09781; MCSD, arXiv 2401.06706).

    A duplicate of a rejected token is tested too: it is always rejected, but p must be updated.
    """

    kinds = ("iid",)

    @staticmethod
    def draw(p: Tensor, q: Tensor, children: Children, rng: RandomSource) -> Tensor:
        state = begin(p)
        for x in children.tokens.unbind(1):
            state = test(state, x, q, rng)
        return finish(state, rng)


class RRSw(Rule):
    """Children drawn from q without replacement, tested in that order (DySpec, arXiv 2410.11744, Algorithm 3)."""

    kinds = ("without_replacement",)

    @staticmethod
    def draw(p: Tensor, q: Tensor, children: Children, rng: RandomSource) -> Tensor:
        state, d = begin(p), q
        for x in children.tokens.unbind(1):
            state, d = test(state, x, d, rng), without(d, x)
        return finish(state, rng)
