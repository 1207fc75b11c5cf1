"""Which rule keeps the target's law for which kind of children, and what `auto` takes."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from vllm_adaptive_tree.acceptance.hub import greedy_multi_draft, spechub
from vllm_adaptive_tree.acceptance.k_seq import k_seq
from vllm_adaptive_tree.acceptance.laws import Kind
from vllm_adaptive_tree.acceptance.rejection import Children
from vllm_adaptive_tree.acceptance.rrs import rrs, rrsw
from vllm_adaptive_tree.acceptance.target_only import target_only
from vllm_adaptive_tree.noise import Noise

Draw = Callable[[Tensor, Tensor, Children, Noise], Tensor]
"""(p [R, V], q [R, V], children, noise) -> tokens [R], distributed as p."""

KINDS: tuple[Kind, ...] = ("one_hot", "without_replacement", "iid", "hub_pair", "top_k_plus_one")


class Rule(NamedTuple):
    kinds: tuple[Kind, ...]  # those for which it is lossless, the best first
    draw: Draw | None  # None: `traversal`, which is no walk from the root
    most: int | None = None  # children of a node, at most


RULES: dict[str, Rule] = {
    "target_only": Rule(KINDS, target_only),
    "rrs": Rule(("iid",), rrs),
    "rrsw": Rule(("without_replacement",), rrsw),
    "spechub": Rule(("hub_pair",), spechub, most=2),
    "greedy_multi_draft": Rule(("top_k_plus_one",), greedy_multi_draft),
    "k_seq": Rule(("iid",), k_seq),
    "traversal": Rule(("without_replacement", "iid", "hub_pair", "top_k_plus_one", "one_hot"), None),
}


def legal_rules(kinds: tuple[Kind, ...], most_children: int) -> list[str]:
    """The rules that serve a proposer whose nodes may have `most_children` children of one of these kinds."""
    return [
        name
        for name, rule in RULES.items()
        if set(kinds) & set(rule.kinds) and (rule.most is None or most_children <= rule.most)
    ]


def common_kind(kinds: tuple[Kind, ...], rule: Rule) -> Kind | None:
    """The proposer's first kind for which the rule is lossless."""
    return next((kind for kind in kinds if kind in rule.kinds), None)
