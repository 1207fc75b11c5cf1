"""Drafters run the draft: one interface for every kind of draft."""

from vllm_adaptive_tree.drafters.base import Drafter, Frontier, Rows
from vllm_adaptive_tree.drafters.lookup import Lookup
from vllm_adaptive_tree.drafters.one_forward import ByDepth, ByParent

__all__ = ["ByDepth", "ByParent", "Drafter", "Frontier", "Lookup", "Rows"]
