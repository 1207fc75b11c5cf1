"""A third party's proposer, rule and draft, as an installed package brings them."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Children, Rule
from vllm_adaptive_tree.drafters import Continuations, DraftOptions, Lookup, Texts
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


@dataclass(frozen=True, kw_only=True)
class AgainOptions(DraftOptions):
    period: int = option(4, lambda value: value in range(1, 65), "a whole number from 1 to 64")


class Again(Lookup):
    """The last `period` tokens once more: one continuation, so its tree is a chain."""

    Options: ClassVar[type[DraftOptions]] = AgainOptions

    def __init__(self, vocabulary: int, period: int):
        super().__init__(vocabulary)
        self.period = period

    @classmethod
    def build(cls, options: AgainOptions, *, vocabulary: int) -> Self:
        return cls(vocabulary, options.period)

    def continuations(self, texts: Texts) -> Continuations:
        place = texts.length[:, None] + torch.arange(-self.period, 0, device=texts.tokens.device)
        tokens = texts.tokens.gather(1, place.clamp(min=0)).masked_fill(place < 0, -1)
        return Continuations(tokens[:, None], torch.ones(len(tokens), 1, device=tokens.device))
