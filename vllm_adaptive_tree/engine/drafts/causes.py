"""Likely causes of a draft that its target rejects, checked against its files; a kind of draft lists its own."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from vllm_adaptive_tree.engine.checkpoint import Checkpoint, local_folder
from vllm_adaptive_tree.engine.targets.auxiliary import default_states, states_of, switches_of
from vllm_adaptive_tree.engine.targets.vocabulary import compare

MOST = 3
"""Number of causes to name: confirmed ones first, then those that files cannot tell."""
NORMS = "input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"
"""Norms of an EAGLE-3 head."""


class Cause(NamedTuple):
    what: str
    confirmed: bool | None
    """True if the files confirm it; None: they cannot tell."""
    why: str

    def __str__(self) -> str:
        return (
            f"{self.what}? {'not known' if self.confirmed is None else 'yes' if self.confirmed else 'no'}: {self.why}"
        )


class ModelPair:
    """A target and its draft, as vLLM has configured them."""

    def __init__(self, config: Any):
        self.config, self.target = config, config.model_config
        self.draft = config.speculative_config.draft_model_config
        self.checkpoint = Checkpoint.read(self.draft.model, self.draft.revision, self.draft.trust_remote_code)
        self.written = self.checkpoint.flat


def causes(config: Any, checks: Iterable["Check"]) -> list[Cause]:
    """Likeliest causes of a draft with a checkpoint, by the `checks` of its kind; `config` is vLLM's."""
    pair, candidates = ModelPair(config), list[Cause]()
    for what, check in checks:
        try:
            candidates.append(Cause(what, *check(pair)))
        except Exception as error:  # a file may be missing, or hold anything
            candidates.append(Cause(what, None, f"it cannot be checked ({type(error).__name__}: {error})"))
    return sorted(candidates, key=lambda cause: (True, None, False).index(cause.confirmed))[:MOST]


Finding = tuple[bool | None, str]


def _tokenizer(pair: ModelPair) -> Finding:
    name, revision = pair.target.tokenizer, pair.target.tokenizer_revision
    both = compare(pair.draft.model, pair.draft.revision, name, revision)
    if both is None:
        return None, "one of the two has no tokenizer.json on this machine"
    return both.another, f"{len(both.differing)} of {both.common} tokens have another number"


def _precision(pair: ModelPair) -> Finding:
    draft, target = (f"{model.dtype}, quantization {model.quantization}" for model in (pair.draft, pair.target))
    draft_quantization, target_quantization = pair.draft.quantization, pair.target.quantization
    if draft_quantization is None and target_quantization is None:
        confirmed: bool | None = False
    else:  # trained together, or a target that was quantised later: its files do not tell
        confirmed = None if draft_quantization in (None, target_quantization) else True
    return confirmed, f"the draft has {draft}, the target {target}"


def _adapters(pair: ModelPair) -> Finding:
    if pair.config.lora_config is None:
        return False, "enable_lora is not set"
    return True, "enable_lora is set, and a draft knows no adapter"


def _length(pair: ModelPair) -> Finding:
    trained, longest = pair.written.get("max_position_embeddings"), pair.target.max_model_len
    if not isinstance(trained, int):
        return None, f"its config.json has no max_position_embeddings, and max_model_len is {longest}"
    return trained < longest, f"its max_position_embeddings is {trained}, max_model_len {longest}"


def _target(pair: ModelPair) -> Finding:
    verifier = (pair.written.get("speculators_config") or {}).get("verifier") or {}
    name = verifier.get("name_or_path")
    if not name:
        return None, f"its config.json names no target, and this is {pair.target.model!r}"
    return Path(name).name != Path(pair.target.model).name, f"it names {name!r}, and this is {pair.target.model!r}"


def _layers(pair: ModelPair) -> Finding:
    if not switches_of(pair.checkpoint).get("use_aux_hidden_state", True):
        return False, "it reads the target's last state"
    layers, states = pair.target.get_total_num_hidden_layers(), states_of(pair.checkpoint)
    if not states:
        return True, f"its config.json does not say which, so vLLM takes {[*default_states(layers)]} of {layers}"
    return None, f"it reads the states below layers {[*states]} of {layers}"


def _norms(pair: ModelPair) -> Finding:
    names = pair.checkpoint.tensors
    if names is None:
        return None, "the names of its tensors are not known"
    missing = [norm for norm in NORMS if not any(f".{name}".endswith(f".{norm}.weight") for name in names)]
    if missing:
        return True, f"its files have no {', '.join(missing)}"
    config = {**pair.written, **(pair.written.get("eagle_config") or {})}
    if any(name.startswith("input_norm.") for name in names) and not config.get("norm_before_fc"):
        return True, "its files have input_norm, which vLLM drops without norm_before_fc in its config.json"
    return False, f"its files have {', '.join(NORMS)}"


def _vocabulary(pair: ModelPair) -> Finding:
    folder, size = local_folder(pair.draft.model, pair.draft.revision), pair.target.get_vocab_size()
    for file in () if folder is None else sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            if "d2t" in opened.keys():  # noqa: SIM118
                offsets = opened.get_tensor("d2t")
                tokens = torch.arange(len(offsets)) + offsets
                right = bool((tokens >= 0).all() and (tokens < size).all()) and len(tokens.unique()) == len(tokens)
                return not right, f"d2t names {len(tokens.unique())} of {size} tokens by {len(tokens)} offsets"
    return False, "it has no d2t"


def _mask(pair: ModelPair) -> Finding:
    return None, f"its config.json names {pair.checkpoint.mask_token}"


Check = tuple[str, Callable[[ModelPair], Finding]]

TOKENIZER: Check = ("another tokenizer than the target's", _tokenizer)
PRECISION: Check = ("a quantised draft or target, of which the draft was not trained", _precision)
ADAPTERS: Check = ("adapters on the target", _adapters)
LENGTH: Check = ("contexts longer than those it was trained for", _length)
TARGET: Check = ("a head of another target", _target)
LAYERS: Check = ("states of other layers than those it was trained with", _layers)
NORM: Check = ("norms that are missing or dropped", _norms)
VOCABULARY: Check = ("a map of its vocabulary (d2t) that is wrong", _vocabulary)
MASK: Check = ("another mask token than the one it was trained with", _mask)
