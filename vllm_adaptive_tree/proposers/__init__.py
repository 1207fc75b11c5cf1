"""What to draft: one file per paper, and the drafter's contract."""

from vllm_adaptive_tree.proposers.base import Drafter, Frontier, Proposer, draft_tree
from vllm_adaptive_tree.proposers.opt_tree import OptTree

__all__ = ["Drafter", "Frontier", "OptTree", "Proposer", "draft_tree"]
