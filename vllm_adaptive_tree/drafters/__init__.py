"""Drafters run the draft: one interface for every kind of draft."""

from typing import Any

from vllm_adaptive_tree.drafters.base import Drafter, DraftOptions, Frontier, Rows, TextDrafter, Texts
from vllm_adaptive_tree.drafters.lookup import Continuations, Lookup
from vllm_adaptive_tree.drafters.one_forward import ByDepth, ByPair, ByParent
from vllm_adaptive_tree.registry import Registry

ONE_FORWARD = ("medusa", "peagle", "dflash", "dflash2", "lilicorr", "dspark")
"""Heads that predict all levels of a tree in one forward."""
CHECKPOINTS = ("model", "eagle", "eagle3", "mtp", *ONE_FORWARD)
"""Kinds of drafts that have a checkpoint: an independent model, and heads that read the target's hidden states."""


def _lacks(what: Any) -> str | None:
    if isinstance(what, type) and issubclass(what, TextDrafter):
        return None
    return "derive it from vllm_adaptive_tree.drafters.TextDrafter"


DRAFTERS: Registry[type[TextDrafter]] = Registry(
    "drafter",
    {"ngram": "vllm_adaptive_tree.drafters.ngram:NGram", "suffix": "vllm_adaptive_tree.drafters.suffix:Suffix"},
    group="vllm_adaptive_tree.drafters",
    lacks=_lacks,
    reserved=CHECKPOINTS,
)
"""Drafts without a checkpoint, by the name that users write into `model`."""


def register_drafter(name: str, cls_or_path: type | str) -> None:
    """Make `model: name` draft with a `TextDrafter`.

    Args:
        name: what users write; must differ from the built-in names.
        cls_or_path: an importable subclass of `TextDrafter`, or "pkg.module:Class".

    Raises:
        ValueError: the name is taken, or the class cannot be imported in another process.
    """
    DRAFTERS.register(name, cls_or_path)


__all__ = [
    "CHECKPOINTS",
    "DRAFTERS",
    "ONE_FORWARD",
    "ByDepth",
    "ByPair",
    "ByParent",
    "Continuations",
    "DraftOptions",
    "Drafter",
    "Frontier",
    "Lookup",
    "Rows",
    "TextDrafter",
    "Texts",
    "register_drafter",
]
