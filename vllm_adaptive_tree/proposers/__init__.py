"""What to draft: one file per paper, and the drafter's contract."""

from vllm_adaptive_tree.proposers.base import Drafter, Frontier, Proposal, Proposer, Request, Rows, draft_tree
from vllm_adaptive_tree.proposers.c2t import C2T
from vllm_adaptive_tree.proposers.dyspec import DySpec
from vllm_adaptive_tree.proposers.eagle2 import Eagle2
from vllm_adaptive_tree.proposers.mcsd import Mcsd
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.proposers.sequoia import sequoia_shape
from vllm_adaptive_tree.proposers.static_tree import StaticTree

__all__ = [
    "C2T",
    "Drafter",
    "DySpec",
    "Eagle2",
    "Frontier",
    "Mcsd",
    "OptTree",
    "Proposal",
    "Proposer",
    "Request",
    "Rows",
    "StaticTree",
    "draft_tree",
    "sequoia_shape",
]
