"""The acceptance rules, and for which kinds of children each is lossless."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from vllm_adaptive_tree.acceptance.hub import greedy_multi_draft, spechub
from vllm_adaptive_tree.acceptance.k_seq import k_seq
from vllm_adaptive_tree.acceptance.rejection import Children
from vllm_adaptive_tree.acceptance.rrs import rrs, rrsw
from vllm_adaptive_tree.acceptance.sibling_probs import Kind
from vllm_adaptive_tree.acceptance.target_only import target_only
from vllm_adaptive_tree.registry import Registry
from vllm_adaptive_tree.rng import RandomSource

Draw = Callable[[Tensor, Tensor, Children, RandomSource], Tensor]
"""(p [R, V], q [R, V], children, rng) -> tokens [R], distributed according to p."""

KINDS: tuple[Kind, ...] = ("one_hot", "without_replacement", "iid", "hub_pair", "top_k_plus_one")


class Rule(NamedTuple):
    kinds: tuple[Kind, ...]  # the kinds of children it is lossless for, best first
    draw: Draw | None  # None: `traversal`, which does not walk from the root
    most: int | None = None  # the most children of a node that it can take


RULES: dict[str, Rule] = {
    "target_only": Rule(KINDS, target_only),
    "rrs": Rule(("iid",), rrs),
    "rrsw": Rule(("without_replacement",), rrsw),
    "spechub": Rule(("hub_pair",), spechub, most=2),
    "greedy_multi_draft": Rule(("top_k_plus_one",), greedy_multi_draft),
    "k_seq": Rule(("iid",), k_seq),
    "traversal": Rule(("without_replacement", "iid", "hub_pair", "top_k_plus_one", "one_hot"), None),
}

VLLM_RULES = ("standard", "synthetic", "block", "fly")
"""vLLM's rules for chains; a tree method refuses them by name."""


def _lacks(what: Any) -> str | None:
    missing = [name for name in Rule._fields if not hasattr(what, name)]
    return f"it has no {', '.join(missing)}; make it a vllm_adaptive_tree.acceptance.Rule" if missing else None


REGISTERED: Registry[Rule] = Registry(
    "acceptance", {}, group="vllm_adaptive_tree.acceptance", lacks=_lacks, reserved=("auto", *RULES, *VLLM_RULES)
)
"""Third-party rules, by the name that users write into `rejection_sample_method`."""


def register_acceptance(name: str, cls_or_path: type | str) -> None:
    """Make `rejection_sample_method: name` verify with a `Rule`.

    Args:
        name: what users write; must differ from the built-in rules and vLLM's.
        cls_or_path: "pkg.module:RULE", the path of a `Rule`, or a class with its attributes.

    Raises:
        ValueError: the name is taken, or the rule cannot be imported in another process.
    """
    REGISTERED.register(name, cls_or_path)


def legal_rules(kinds: tuple[Kind, ...], max_children: int) -> list[str]:
    """The built-in rules that serve children of these kinds."""
    return [name for name, rule in RULES.items() if serves(rule, kinds, max_children)]


def serves(rule: Rule, kinds: tuple[Kind, ...], max_children: int) -> bool:
    """Whether a rule is lossless for one of these kinds, with up to `max_children` children of a node."""
    return common_kind(kinds, rule) is not None and (rule.most is None or max_children <= rule.most)


def common_kind(kinds: tuple[Kind, ...], rule: Rule) -> Kind | None:
    """The proposer's first kind for which the rule is lossless."""
    return next((kind for kind in kinds if kind in rule.kinds), None)
