"""Acceptance rules: from a verified tree to emitted tokens, without changing the target's distribution."""

from vllm_adaptive_tree.acceptance.legality import (
    RULES,
    VLLM_RULES,
    legal_rules,
)
from vllm_adaptive_tree.acceptance.rejection import Children
from vllm_adaptive_tree.acceptance.rule import KINDS, Draw, Kind, Rule
from vllm_adaptive_tree.acceptance.target_init import longest_continuation
from vllm_adaptive_tree.acceptance.target_only import TargetOnly
from vllm_adaptive_tree.acceptance.traversal import traversal
from vllm_adaptive_tree.acceptance.walk import Accepted, walk

__all__ = [
    "KINDS",
    "RULES",
    "VLLM_RULES",
    "Accepted",
    "Children",
    "Draw",
    "Kind",
    "Rule",
    "TargetOnly",
    "legal_rules",
    "longest_continuation",
    "traversal",
    "walk",
]
