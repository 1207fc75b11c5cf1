"""The kind of a draft, told by its checkpoint: by its config.json, and by the names and shapes of its tensors.

Its path decides nothing: vLLM takes a folder whose name contains "eagle3" for an EAGLE-3 head, whatever is in it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_adaptive_tree.config import UNSERVED, served
from vllm_adaptive_tree.drafters import CHECKPOINTS
from vllm_adaptive_tree.engine.checkpoint import Checkpoint, Shape

NAMES = {
    "model": "an independent model",
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "mtp": "an MTP module",
    "medusa": "Medusa heads",
    "peagle": "a P-EAGLE head",
    "dflash": "a DFlash head",
    "dflash2": "a DFlash2 head",
    "lilicorr": "a LiLiCorr head",
    "dspark": "a DSpark head",
    **UNSERVED,
}
VLLM_METHODS = {kind: kind for kind in CHECKPOINTS}
VLLM_METHODS |= {"model": "draft_model", "peagle": "eagle3", "dflash2": "dflash", "lilicorr": "dflash"}
"""Kind -> vLLM's method."""
BUILT_AS = VLLM_METHODS | {"dspark": "dflash"}
"""The same while a configuration is built: Model Runner V1 refuses "dspark"."""
OTHER = "a draft head of a kind that is not known here"

SPECULATORS = {name: name for name in ("eagle3", "peagle", "dflash", "dflash2", "dspark", "xpress")}
"""`speculators_model_type` -> kind; vLLM loads no others in that format."""
MODEL_TYPES = {"medusa": "medusa", "mlp_speculator": "mlp_speculator"}
ARCHITECTURES = (  # the first that is found in a name
    ("(?i)medusa", "medusa"),
    ("(?i)mlpspeculator", "mlp_speculator"),
    ("(?i)xpress", "xpress"),
    ("(?i)peagle", "peagle"),
    ("(?i)dspark", "dspark"),
    ("(?i)dflash2", "dflash2"),
    ("(?i)lilicorr", "lilicorr"),
    ("(?i)dflash|museglimmerassistant", "dflash"),
    ("(?i)eagle3", "eagle3"),
    ("^Eagle[A-Z]", "eagle"),  # Eagle2_5_VL is a model
    ("MTP", "mtp"),
)
PARALLEL = ("num_depths", "pard_token", "ptd_token_id")
"""Keys of a config.json that make of an EAGLE-3 head, which is vLLM's class of them too, a P-EAGLE head."""
KEYS = {
    "medusa_num_heads": "medusa",
    "dflash_config": "dflash",
    "draft_vocab_size": "eagle3",
    "eagle_aux_hidden_state_layer_ids": "eagle3",
    "eagle_config": "eagle3",
}
"""Keys of a config.json that names no kind -> kind."""
MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""How many MTP modules a target's own checkpoint has."""
TENSORS = (  # the first that is found among the names, without prefix
    (r"medusa_heads?\.|lm_heads\.|blocks\.\d+\.layers\.|\d+\.", "medusa"),
    (r"speculator\.", "mlp_speculator"),
    (r"candidate_selector\.", "dflash2"),
    (r"lilicorr\.", "lilicorr"),
    (r"markov_head\.", "dspark"),
    (r"mask_hidden$", "peagle"),
    (r"midlayer\.|layers\.\d+\.hidden_norm\.", "eagle3"),
    (r"hidden_norm\.", "dflash"),
    (r"d2t$|t2d$", "eagle3"),
)
EMBEDDINGS = ("emb", "wte")
"""Substrings of the names of token embeddings, in every family of models."""


class Fact(NamedTuple):
    kind: str
    why: str
    weak: bool = False
    """Whether vLLM would load the checkpoint as another kind, too, if it is told to."""

    def __str__(self) -> str:
        return f"{NAMES.get(self.kind, OTHER)} ({self.why})"


def kind_of(checkpoint: Checkpoint, *, said: str | None, target: str) -> str:
    """One of `CHECKPOINTS`.

    Args:
        said: the kind that the user gives.
        target: the target's folder or hub name; MTP layers are often in the same one.

    Raises:
        ValueError: the kind is not served, or what the user, the config and the tensors say differs.
    """
    config = of_config(checkpoint.config)
    if config is None and said is None and _same(checkpoint.model, target):
        config = _own_mtp(checkpoint.config)
    tensors = of_tensors(checkpoint.tensors or {})
    if "mtp" in (said, config and config.kind):
        tensors = None  # those of MTP modules have no names in common, and the target's are with them
    for fact in (config, tensors):
        if fact is not None and fact.kind not in CHECKPOINTS:
            raise checkpoint.refused(f"is {fact}, not served yet; {served()}")
    if said is None and config is not None and tensors is not None and config.kind != tensors.kind:
        remedy = ", or give the kind in 'tree' as 'draft'" if config.weak else ""
        raise checkpoint.refused(
            f"is {config} by its config.json, and {tensors} by its tensors; correct the config.json{remedy}"
        )
    for fact in (tensors, None if config is None or config.weak else config):
        if said is not None and fact is not None and fact.kind != said:
            raise ValueError(
                f"speculative_config['tree']['draft'] is {said!r}, and {checkpoint.model!r} is {fact}; remove 'draft', "
                "or give another checkpoint as 'model'"
            )
    return said or (config or tensors or Fact("model", "")).kind


def of_config(config: Mapping[str, Any]) -> Fact | None:
    """What a config.json says; None: nothing, as that of an independent model."""
    if (name := config.get("speculators_model_type")) is not None:
        return Fact(SPECULATORS.get(name, "other"), f"speculators_model_type {name!r}")
    model_type = str(config.get("model_type", ""))
    if model_type in MODEL_TYPES:
        return Fact(MODEL_TYPES[model_type], f"model_type {model_type!r}")
    if model_type.endswith("_mtp"):
        return Fact("mtp", f"model_type {model_type!r}")
    for architecture in config.get("architectures") or ():
        for pattern, kind in ARCHITECTURES:
            if re.search(pattern, architecture):
                own = next((key for key in PARALLEL if kind == "eagle3" and config.get(key) is not None), None)
                if own is not None:
                    return Fact("peagle", f"architecture {architecture!r} with {own}")
                return Fact(kind, f"architecture {architecture!r}")
    if model_type == "eagle":
        return Fact("eagle", f"model_type {model_type!r}")
    for key, kind in KEYS.items():
        if config.get(key) is not None:
            return Fact(kind, f"{key} in its config.json", weak=True)
    return None


def of_tensors(tensors: Mapping[str, Shape | None]) -> Fact | None:
    """What the tensors of these names and shapes say; None: nothing, if there are none."""
    names = sorted(tensors)
    for pattern, kind in TENSORS:
        if (name := next(filter(re.compile(pattern).match, names), None)) is not None:
            return Fact(kind, f"tensor {name!r}")
    if "fc.weight" in tensors:  # joins the embedding of a token with one state of the target, or three states
        shape = tensors["fc.weight"]
        kind = "eagle3" if shape is not None and len(shape) == 2 and shape[1] > 2 * shape[0] else "eagle"
        return Fact(kind, f"tensor 'fc.weight' of shape {'unknown' if shape is None else list(shape)}")
    if names and not any(part in name for name in names for part in EMBEDDINGS):
        return Fact("other", f"no token embedding among its tensors ({', '.join(names[:3])}, ...)")
    return Fact("model", "a token embedding, and no tensor of a head") if names else None


def _own_mtp(config: Mapping[str, Any]) -> Fact | None:
    for part in (config, config.get("text_config") or {}):
        for key in MTP_KEYS:
            if part.get(key):
                return Fact("mtp", f"the target itself, {key} {part[key]}", weak=True)
    return None


def _same(model: str, target: str) -> bool:
    folders = Path(model), Path(target)
    return model == target or (all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1]))
