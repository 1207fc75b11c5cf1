"""The acceptance rule `new_method`: a rejection test of the first child."""

from torch import Tensor

from vllm_adaptive_tree import Rule
from vllm_adaptive_tree.acceptance import Children
from vllm_adaptive_tree.acceptance.rejection import begin, finish, test
from vllm_adaptive_tree.rng import RandomSource


class NewMethod(Rule):
    """Accept the first child x ~ q with probability min(1, p(x) / q(x)), else sample from norm((p - q)+).

    Other children are accepted if that sample happens to match.
    """

    kinds = ("without_replacement", "iid")

    @staticmethod
    def draw(p: Tensor, q: Tensor, children: Children, rng: RandomSource) -> Tensor:
        return finish(test(begin(p), children.tokens[:, 0], q, rng), rng)
