"""A decoding step: verify, accept, commit, draft. It imports no engine; an adapter provides the ports."""

from vllm_adaptive_tree.step.accept import walked
from vllm_adaptive_tree.step.ports import Draft, Engine, Requests, Target, Verification
from vllm_adaptive_tree.step.step import TreeStep

__all__ = ["Draft", "Engine", "Requests", "Target", "TreeStep", "Verification", "walked"]
