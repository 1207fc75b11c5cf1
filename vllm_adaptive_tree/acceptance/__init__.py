"""What to keep: rules that turn a verified tree into emitted tokens without changing the target's law."""

from vllm_adaptive_tree.acceptance.initial import longest
from vllm_adaptive_tree.acceptance.laws import Kind
from vllm_adaptive_tree.acceptance.pairs import (
    REGISTERED,
    RULES,
    VLLM_RULES,
    Rule,
    common_kind,
    legal_rules,
    register_acceptance,
)
from vllm_adaptive_tree.acceptance.rejection import Children
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
    "register_acceptance",
    "traversal",
    "walk",
]
