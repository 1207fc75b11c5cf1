"""The true law of every sibling, given the siblings before it: what a rule that serves several kinds needs."""

from typing import Literal

from torch import Tensor

from vllm_adaptive_tree.acceptance.hub import off_hub, rest
from vllm_adaptive_tree.acceptance.rejection import one_hot, pick, without
from vllm_adaptive_tree.vocab_ops import topk_tokens

Kind = Literal["one_hot", "without_replacement", "iid", "hub_pair", "top_k_plus_one"]
"""How the children of a node come about: chosen, drawn from q in two ways, or as SpecHub and Greedy mix both."""


def first_law(kind: Kind, q: Tensor, drawn: Tensor, most: int, x: Tensor) -> Tensor:
    """Law [R, V] of the first child x [R], of `drawn` [R] children planned, never more than `most`."""
    match kind:
        case "one_hot":
            return one_hot(x, q)
        case "top_k_plus_one":
            return rest(q, topk_tokens(q, most - 1), drawn - 1)
        case _:
            return q


def next_law(kind: Kind, q: Tensor, d: Tensor, before: Tensor, x: Tensor) -> Tensor:
    """Law [R, V] of the child x [R] that follows the rejected child `before` [R], whose law was d [R, V]."""
    match kind:
        case "without_replacement":
            return without(d, before)
        case "iid":
            return q
        case "hub_pair":
            hub = topk_tokens(q, 1)[:, 0]
            return pick(before == hub, off_hub(q), one_hot(hub, q))
        case _:
            return one_hot(x, q)
