"""Drafters run the draft: one interface for every kind of draft."""

from typing import Any

from vllm_adaptive_tree.drafters.base import Drafter, DraftOptions, Frontier, Rows, TextDrafter, Texts
from vllm_adaptive_tree.drafters.lookup import Continuations, Lookup
from vllm_adaptive_tree.drafters.one_forward import ByDepth, ByPair, ByParent, ByPath
from vllm_adaptive_tree.registry import Registry

KINDS = "vllm_adaptive_tree.engine.drafts"
"""Room of the kinds of drafts; it is loaded only by path, where an engine or an error needs one."""


DRAFT_KINDS: Registry[Any] = Registry(
    "kind of draft",
    f"{KINDS}:DraftKind",
    {
        "model": f"{KINDS}.independent:Independent",
        "eagle": f"{KINDS}.eagle:Eagle",
        "eagle3": f"{KINDS}.eagle:Eagle3",
        "mtp": f"{KINDS}.eagle:MTP",
        "peagle": f"{KINDS}.parallel:PEagle",
        "dflash": f"{KINDS}.block:DFlash",
        "dflash2": f"{KINDS}.block:DFlash2",
        "lilicorr": f"{KINDS}.block:LiLiCorr",
        "dspark": f"{KINDS}.block:DSpark",
        "xpress": f"{KINDS}.block:XPress",
    },
    group="vllm_adaptive_tree.draft_kinds",
)
"""Kinds of drafts that have a checkpoint, subclasses of `engine.drafts.DraftKind`."""

TEXT_KIND = f"{KINDS}.text:Text"
"""Kind of all drafts without a checkpoint."""
DRAFTERS: Registry[type[TextDrafter]] = Registry(
    "drafter",
    TextDrafter,
    {"ngram": "vllm_adaptive_tree.drafters.ngram:NGram", "suffix": "vllm_adaptive_tree.drafters.suffix:Suffix"},
    group="vllm_adaptive_tree.drafters",
    reserved=tuple(DRAFT_KINDS.built_in),
)
"""Drafts without a checkpoint, by the name that users write into `model`."""
DRAFT_KINDS.reserved = tuple(DRAFTERS.built_in)


__all__ = [
    "DRAFTERS",
    "DRAFT_KINDS",
    "TEXT_KIND",
    "ByDepth",
    "ByPair",
    "ByParent",
    "ByPath",
    "Continuations",
    "DraftOptions",
    "Drafter",
    "Frontier",
    "Lookup",
    "Rows",
    "TextDrafter",
    "Texts",
]
