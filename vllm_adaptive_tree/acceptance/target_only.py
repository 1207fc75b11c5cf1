"""Target-only verification: sample from the target, and accept a child that happens to match."""

from torch import Tensor

from vllm_adaptive_tree.acceptance.rejection import Children
from vllm_adaptive_tree.acceptance.rule import KINDS, Rule
from vllm_adaptive_tree.rng import RandomSource


class TargetOnly(Rule):
    """Sample from the target, whatever the children (naive sampling; OPT-Tree's verification, arXiv 2406.17276).

    Lossless for every tree; given the same random numbers, the same tokens as plain decoding. The acceptance rate is
    p(children), the best that any lossless rule can do for children that were not sampled.
    """

    kinds = KINDS

    @staticmethod
    def draw(p: Tensor, q: Tensor, children: Children, rng: RandomSource) -> Tensor:
        return rng.sample(p)
