"""Tree speculative decoding for stock vLLM: the draft tree follows the draft model's own probabilities."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_adaptive_tree.version import __version__

if TYPE_CHECKING:
    from vllm_adaptive_tree.acceptance import Rule
    from vllm_adaptive_tree.drafters import TextDrafter
    from vllm_adaptive_tree.proposers import BestFirst, Candidates, Growth, Proposer, best_candidates, log_softmax_at
    from vllm_adaptive_tree.registry import register
    from vllm_adaptive_tree.trees import TokenTree

__all__ = [
    "BestFirst",
    "Candidates",
    "Growth",
    "Proposer",
    "Rule",
    "TextDrafter",
    "TokenTree",
    "__version__",
    "best_candidates",
    "log_softmax_at",
    "register",
]

_ROOMS = {
    "BestFirst": "proposers",
    "Candidates": "proposers",
    "Growth": "proposers",
    "Proposer": "proposers",
    "Rule": "acceptance",
    "TextDrafter": "drafters",
    "TokenTree": "trees",
    "best_candidates": "proposers",
    "log_softmax_at": "proposers",
    "register": "registry",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: a command that only prints its version loads no torch."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
