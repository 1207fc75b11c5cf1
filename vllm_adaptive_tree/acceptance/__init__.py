"""What to keep: rules that turn a verified tree into emitted tokens without changing the target's law."""

from vllm_adaptive_tree.acceptance.target_only import Accepted, target_only

__all__ = ["Accepted", "target_only"]
