"""A third party's proposer and rule, as an installed package brings them."""

from torch import Tensor

from vllm_adaptive_tree.acceptance import Children, Rule
from vllm_adaptive_tree.noise import Noise
from vllm_adaptive_tree.proposers import StaticTree
from vllm_adaptive_tree.trees import Shape


class Fan(StaticTree):
    """`width` chains of `length` tokens that part at the root."""

    def __init__(self, *, width: int, length: int):
        super().__init__(Shape.k_config([width, *[1] * (length - 1)]))


def draw(p: Tensor, q: Tensor, children: Children, noise: Noise) -> Tensor:
    return noise.choose(p)


PLAIN = Rule(kinds=("one_hot",), draw=draw)
