"""Base class of acceptance rules, and the kinds of children for which a rule may be lossless."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from vllm_adaptive_tree.acceptance.rejection import Children
from vllm_adaptive_tree.rng import RandomSource

Kind = Literal["one_hot", "without_replacement", "iid", "hub_pair", "top_k_plus_one"]
"""Kinds of children, by how they are picked:

- one_hot: deterministically, the top-k tokens of q (users write "top_k");
- without_replacement, iid: sampled from q without or with replacement;
- hub_pair: SpecHub's pairs, which always contain the argmax of q;
- top_k_plus_one: the top k - 1 tokens of q and one sampled from the rest (greedy multi-draft).
"""
KINDS: tuple[Kind, ...] = get_args(Kind)

Draw = Callable[[Tensor, Tensor, Children, RandomSource], Tensor]
"""(p [R, V], q [R, V], children, rng) -> tokens [R], distributed according to p."""


class Rule:
    """Acceptance rule. A subclass has `kinds` and a static method `draw`; it is never instantiated."""

    kinds: ClassVar[tuple[Kind, ...]]
    """Kinds of children for which it is lossless, best first."""
    most: ClassVar[int | None] = None
    """The most children of a node that it can take."""

    @staticmethod
    def draw(p: Tensor, q: Tensor, children: Children, rng: RandomSource) -> Tensor:
        """Sample the next token [R] at a node, distributed according to the target's p [R, V].

        q [R, V]: the draft's distribution. All randomness comes from `rng`. None in place of this method: `traversal`,
        which does not walk from the root.
        """
        raise NotImplementedError

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        kinds = getattr(cls, "kinds", ())
        if not isinstance(kinds, tuple) or not kinds or not set(kinds) <= set(KINDS):
            raise TypeError(f"rule {cls.__name__}: kinds must be a tuple of {', '.join(KINDS)}, got {kinds!r}")
        if cls.draw is Rule.draw:
            raise TypeError(f"rule {cls.__name__} does not define draw(p, q, children, rng)")

    @classmethod
    def kind_of(cls, kinds: tuple[Kind, ...]) -> Kind | None:
        """Proposer's first kind for which the rule is lossless."""
        return next((kind for kind in kinds if kind in cls.kinds), None)

    @classmethod
    def serves(cls, kinds: tuple[Kind, ...], max_children: int) -> bool:
        """Return whether it is lossless for one of these kinds, with up to `max_children` children of a node."""
        return cls.kind_of(kinds) is not None and (cls.most is None or max_children <= cls.most)
