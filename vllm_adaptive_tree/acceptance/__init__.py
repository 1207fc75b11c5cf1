"""Acceptance rules: from a verified tree to emitted tokens, without changing the target's distribution."""

from vllm_adaptive_tree.acceptance.legality import (
    REGISTERED,
    RULES,
    VLLM_RULES,
    Rule,
    common_kind,
    legal_rules,
    register_acceptance,
    serves,
)
from vllm_adaptive_tree.acceptance.rejection import Children
from vllm_adaptive_tree.acceptance.sibling_probs import Kind
from vllm_adaptive_tree.acceptance.target_init import longest_continuation
from vllm_adaptive_tree.acceptance.traversal import traversal
from vllm_adaptive_tree.acceptance.walk import Accepted, walk

__all__ = [
    "REGISTERED",
    "RULES",
    "VLLM_RULES",
    "Accepted",
    "Children",
    "Kind",
    "Rule",
    "common_kind",
    "legal_rules",
    "longest",
    "longest_continuation",
    "register_acceptance",
    "serves",
    "traversal",
    "walk",
]

longest = longest_continuation  # the name of release 0.1, for one release
