"""Proposers decide what to draft: one file per paper."""

from vllm_adaptive_tree.options import option
from vllm_adaptive_tree.proposers.base import Proposal, Proposer, Request, draft_tree, log_softmax_at
from vllm_adaptive_tree.proposers.best_first import BestFirst, Candidates, Growth, best_candidates
from vllm_adaptive_tree.proposers.options import MethodOptions, Steered
from vllm_adaptive_tree.proposers.static_tree import StaticTree
from vllm_adaptive_tree.registry import Registry

PROPOSERS: Registry[type[Proposer]] = Registry(
    "proposer",
    Proposer,
    {
        "adaptive_tree": "vllm_adaptive_tree.proposers.adaptive_tree:AdaptiveTree",
        "opt_tree": "vllm_adaptive_tree.proposers.opt_tree:OptTree",
        "dyspec": "vllm_adaptive_tree.proposers.dyspec:DySpec",
        "c2t": "vllm_adaptive_tree.proposers.c2t:C2T",
        "eagle2": "vllm_adaptive_tree.proposers.eagle2:Eagle2",
        "static_tree": "vllm_adaptive_tree.proposers.static_tree:StaticTree",
        "sequoia": "vllm_adaptive_tree.proposers.sequoia:Sequoia",
        "mcsd": "vllm_adaptive_tree.proposers.mcsd:Mcsd",
    },
    group="vllm_adaptive_tree.proposers",
)
"""Proposers by the name that users write into `method`."""
METHODS = tuple(PROPOSERS.built_in)
RECOMMENDED = "adaptive_tree"
"""The method to start with."""


__all__ = [
    "METHODS",
    "PROPOSERS",
    "RECOMMENDED",
    "BestFirst",
    "Candidates",
    "Growth",
    "MethodOptions",
    "Proposal",
    "Proposer",
    "Request",
    "StaticTree",
    "Steered",
    "best_candidates",
    "draft_tree",
    "log_softmax_at",
    "option",
]
