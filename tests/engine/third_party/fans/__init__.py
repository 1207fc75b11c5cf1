"""A third party's proposer and rule, as an installed package brings them."""

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from vllm_adaptive_tree.acceptance import Children, Rule
from vllm_adaptive_tree.proposers import MethodOptions, StaticTree, option
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.trees import Shape


@dataclass(frozen=True, kw_only=True)
class FanOptions(MethodOptions):
    width: int = option(2, lambda value: value in range(1, 17), "a whole number from 1 to 16")
    length: int = option(4, lambda value: value in range(1, 17), "a whole number from 1 to 16")


class Fan(StaticTree):
    """`width` chains of `length` tokens that part at the root."""

    Options: ClassVar[type[MethodOptions]] = FanOptions

    @classmethod
    def build(cls, options: FanOptions, *, nodes: int) -> Self:
        return cls(Shape.k_config([options.width, *[1] * (options.length - 1)], nodes))


def draw(p: Tensor, q: Tensor, children: Children, rng: RandomSource) -> Tensor:
    return rng.sample(p)


PLAIN = Rule(kinds=("one_hot",), draw=draw)
