"""Distribution of each sibling given the siblings before it, for every kind of children."""

from torch import Tensor

from vllm_adaptive_tree.acceptance.hub import without_argmax, without_best
from vllm_adaptive_tree.acceptance.rejection import one_hot, where_rows, without
from vllm_adaptive_tree.acceptance.rule import Kind
from vllm_adaptive_tree.vocab_ops import topk_tokens


def first_child_probs(kind: Kind, q: Tensor, num_planned: Tensor, max_children: int, x: Tensor) -> Tensor:
    """Distribution [R, V] of the first child x [R], with `num_planned` [R] children planned, `max_children` at most."""
    match kind:
        case "one_hot":
            return one_hot(x, q)
        case "top_k_plus_one":
            return without_best(q, topk_tokens(q, max_children - 1), num_planned - 1)
        case _:
            return q


def next_child_probs(kind: Kind, q: Tensor, d: Tensor, rejected: Tensor, x: Tensor) -> Tensor:
    """Distribution [R, V] of the child x [R] after the `rejected` sibling [R], whose distribution was d [R, V]."""
    match kind:
        case "without_replacement":
            return without(d, rejected)
        case "iid":
            return q
        case "hub_pair":
            hub = topk_tokens(q, 1)[:, 0]
            return where_rows(rejected == hub, without_argmax(q), one_hot(hub, q))
        case _:
            return one_hot(x, q)
