"""Proposers decide what to draft: one file per paper."""

from typing import Any

from vllm_adaptive_tree.options import option
from vllm_adaptive_tree.proposers.base import Proposal, Proposer, Request, draft_tree
from vllm_adaptive_tree.proposers.options import MethodOptions, Steered
from vllm_adaptive_tree.proposers.static_tree import StaticTree
from vllm_adaptive_tree.registry import Registry


def _lacks(what: Any) -> str | None:
    if isinstance(what, type) and issubclass(what, Proposer):
        return None
    return "derive it from vllm_adaptive_tree.proposers.Proposer"


PROPOSERS: Registry[type[Proposer]] = Registry(
    "proposer",
    {
        "opt_tree": "vllm_adaptive_tree.proposers.opt_tree:OptTree",
        "dyspec": "vllm_adaptive_tree.proposers.dyspec:DySpec",
        "c2t": "vllm_adaptive_tree.proposers.c2t:C2T",
        "eagle2": "vllm_adaptive_tree.proposers.eagle2:Eagle2",
        "static_tree": "vllm_adaptive_tree.proposers.static_tree:StaticTree",
        "sequoia": "vllm_adaptive_tree.proposers.sequoia:Sequoia",
        "mcsd": "vllm_adaptive_tree.proposers.mcsd:Mcsd",
    },
    group="vllm_adaptive_tree.proposers",
    lacks=_lacks,
)
"""By the name that users write into `method`."""
METHODS = tuple(PROPOSERS.built_in)


def register_proposer(name: str, cls_or_path: type | str) -> None:
    """Make `method: name` draft with a `Proposer`.

    Args:
        name: what users write; must differ from the built-in methods.
        cls_or_path: an importable subclass of `Proposer`, or "pkg.module:Class".

    Raises:
        ValueError: the name is taken, or the class cannot be imported in another process.
    """
    PROPOSERS.register(name, cls_or_path)


__all__ = [
    "METHODS",
    "PROPOSERS",
    "MethodOptions",
    "Proposal",
    "Proposer",
    "Request",
    "StaticTree",
    "Steered",
    "draft_tree",
    "option",
    "register_proposer",
]
