"""Kinds of drafts: one class a kind, by the names of `drafters.DRAFT_KINDS`."""

from vllm_adaptive_tree.engine.drafts.base import DraftKind

__all__ = ["DraftKind"]
