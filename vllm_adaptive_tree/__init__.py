"""Tree speculative decoding for stock vLLM: the draft tree follows the draft model's own probabilities."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_adaptive_tree.version import __version__

if TYPE_CHECKING:
    from vllm_adaptive_tree.acceptance import Rule, register_acceptance
    from vllm_adaptive_tree.drafters import TextDrafter, register_drafter
    from vllm_adaptive_tree.proposers import Proposer, register_proposer
    from vllm_adaptive_tree.trees import TokenTree

__all__ = [
    "Proposer",
    "Rule",
    "TextDrafter",
    "TokenTree",
    "__version__",
    "register_acceptance",
    "register_drafter",
    "register_proposer",
]

_ROOMS = {
    "Proposer": "proposers",
    "Rule": "acceptance",
    "TextDrafter": "drafters",
    "TokenTree": "trees",
    "register_acceptance": "acceptance",
    "register_drafter": "drafters",
    "register_proposer": "proposers",
}


def __getattr__(name: str) -> Any:
    """Imported when asked for: a command that only says its version loads no torch."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
