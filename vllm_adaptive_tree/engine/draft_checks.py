"""Whether a draft fits the target, and this release: errors at start-up with both facts and the remedy."""

import copy
from itertools import pairwise
from typing import Any, get_args

from vllm_adaptive_tree.config import served
from vllm_adaptive_tree.drafters import CHECKPOINTS, ONE_FORWARD
from vllm_adaptive_tree.engine import one_forward, one_forward_checks
from vllm_adaptive_tree.engine.checkpoint import Checkpoint, written_config
from vllm_adaptive_tree.engine.draft_kind import BUILT_AS, NAMES, VLLM_METHODS
from vllm_adaptive_tree.methods import Pair

AUXILIARY = ("eagle3", "peagle", *one_forward.CLASSES)
"""Heads that read states of the target's layers."""
REFUSED_MTP = {
    "gemma4_mtp": "Gemma 4's assistant, which shares the target's K/V",
    "step3p5_mtp": "Step 3.5's MTP modules, which vLLM drafts with in a way of its own",
}


def read_draft(args: Any, model: str, revision: str | None) -> Checkpoint:
    """`args` is vLLM's EngineArgs."""
    try:
        return Checkpoint.read(model, revision, args.trust_remote_code)
    except Exception as error:
        raise _unreadable(model, error) from error


def check_target(args: Any) -> None:
    """Refuse a head in the place of the target. vLLM would load its verifier, and draft with a method of its own."""
    try:
        written = written_config(args.model, args.revision, args.trust_remote_code)
    except Exception:  # vLLM says what is wrong
        return
    if (speculators := written.get("speculators_config")) is not None:
        verifier = (speculators.get("verifier") or {}).get("name_or_path")
        raise ValueError(
            f"model: {args.model!r} is a head in the format of speculators, for the target {verifier!r}; give the "
            f"target as the model, and {args.model!r} as speculative_config['model']"
        )


def check_method(pair: Pair, kind: str) -> None:
    """Refuse a method that needs more of a draft than this `kind` gives."""
    if kind != "model" and pair.init_width > 1:
        raise ValueError(
            f"speculative_config['tree']['init_width'] above 1 needs an independent model, and the draft is {kind!r}; "
            "use init_width 1"
        )
    if (kind not in CHECKPOINTS or kind in ONE_FORWARD) and pair.proposer.hidden_size is not None:
        raise ValueError(
            f"speculative_config['tree']['stop'] 'type1' reads the draft's hidden states, and {kind!r} has none of its "
            "nodes; use stop 'type2'"
        )


def check_draft(args: Any, draft: Checkpoint, kind: str, keys: dict[str, Any]) -> None:
    """Refuse, before vLLM builds its configuration, what it would refuse in other words or not at all.

    Args:
        args: vLLM's EngineArgs.
        kind: of `drafters.CHECKPOINTS`.
        keys: vLLM's keys of the speculative_config.
    """
    from vllm import envs
    from vllm.transformers_utils.config import get_config

    if kind == "medusa":
        one_forward_checks.check_medusa_is_there(draft)
    one_forward_checks.check_runs_on_v1(draft, kind, v2=bool(envs.VLLM_USE_V2_MODEL_RUNNER))
    try:
        overrides = {"hf_overrides_kw": {"model_type": "medusa"}} if kind == "medusa" else {}
        config = get_config(draft.model, args.trust_remote_code, revision=keys.get("revision"), **overrides)
    except Exception as error:
        raise _unreadable(draft.model, error) from error
    target = get_config(args.model, args.trust_remote_code, revision=args.revision)
    sizes = [part.get_text_config().vocab_size for part in (config, target)]
    if kind == "medusa":
        one_forward_checks.check_medusa(draft, sizes)
    if sizes[0] != sizes[1]:
        raise draft.refused(
            f"has a vocabulary of {sizes[0]} tokens and the target one of {sizes[1]}; use a draft trained with the "
            "target's tokenizer"
        )
    if kind == "mtp":
        _check_mtp(draft, config)
    elif kind in one_forward.CLASSES:
        one_forward_checks.check_block_head(draft, kind, config, sizes[0])
    elif kind != "model":
        _check_architecture(draft, kind, config)
    if kind == "peagle":
        one_forward_checks.check_mask(draft, sizes[0])
    _check_ranks(draft, config.get_text_config(), args.tensor_parallel_size, keys)


def _check_mtp(draft: Checkpoint, config: Any) -> None:
    from vllm.config.speculative import MTPModelTypes, SpeculativeConfig

    found = SpeculativeConfig.hf_config_override(copy.deepcopy(config))
    modules = getattr(found, "n_predict", None) or 0
    if found.model_type in REFUSED_MTP:
        raise draft.refused(f"is {REFUSED_MTP[found.model_type]}, not served yet; {served()}")
    if found.model_type not in get_args(MTPModelTypes) or modules < 1:
        raise draft.refused(
            f"(model_type {config.model_type!r}) has no MTP module that this vLLM knows; remove 'draft' from 'tree', "
            "and give a draft as 'model'"
        )
    if modules > 1:
        raise draft.refused(f"has {modules} MTP modules, one for each depth, not served yet; {served()}")


def _check_architecture(draft: Checkpoint, kind: str, config: Any) -> None:
    """vLLM has a class of its own for the heads of every family of targets."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.configs.eagle import EAGLEConfig
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    if kind == "peagle":
        config.architectures = [one_forward.PARALLEL.get(one, one) for one in config.architectures or ()]
    if kind != "medusa" and not isinstance(config, EAGLEConfig | SpeculatorsConfig):
        config = EAGLEConfig(config, method=VLLM_METHODS[kind], model_type="eagle")
    if not set(config.architectures) & ModelRegistry.get_supported_archs():
        raise draft.refused(
            f"is {NAMES[kind]} of architecture {config.architectures[0]!r}, which this vLLM does not have; correct "
            "'architectures' in its config.json, or use another draft"
        )


def _check_ranks(draft: Checkpoint, text: Any, ranks: int, keys: dict[str, Any]) -> None:
    own = keys.get("draft_tensor_parallel_size") or ranks
    if own != ranks:
        raise ValueError(
            f"speculative_config['draft_tensor_parallel_size'] is {own}, and tensor_parallel_size {ranks}; a tree "
            "method needs the same: remove the first"
        )
    heads = getattr(text, "num_attention_heads", None) or ranks
    kv = getattr(text, "num_key_value_heads", None) or heads
    units = getattr(text, "intermediate_size", None) or ranks
    for size, what, fits in (
        (heads, "attention heads", heads % ranks == 0),
        (kv, "K/V heads", kv % ranks == 0 or ranks % kv == 0),
        (units, "MLP units", units % ranks == 0),
    ):
        if not fits:
            raise draft.refused(
                f"has {size} {what}, which cannot be cut for tensor_parallel_size={ranks}; give a smaller size, or "
                "another draft"
            )


def check_fit(config: Any, draft: Checkpoint, kind: str, levels: int | None = None) -> None:
    """Refuse a draft that vLLM takes for another kind, and a head of another target. `config`: the built VllmConfig;
    `levels`: that a head of one forward predicts."""
    spec, target = config.speculative_config, config.model_config
    if spec.method != BUILT_AS[kind]:
        raise draft.refused(f"is {NAMES[kind]}, and vLLM can load it as {spec.method!r} only; use another draft")
    if kind == "model":
        return
    one_forward_checks.check_runs_on_v1(draft, kind, v2=config.use_v2_model_runner)
    one_forward_checks.check_adapters(config, draft, kind)
    head, size = spec.draft_model_config.hf_config, target.get_hidden_size()
    key, own = "hidden_size", spec.draft_model_config.get_hidden_size()
    if kind in AUXILIARY and getattr(head, "target_hidden_size", None):
        key, own = "target_hidden_size", head.target_hidden_size
    if own != size:
        raise draft.refused(
            f"reads hidden states of {own} ({key}), and the target's have {size}; use a head trained for this target"
        )
    states, what = 2, "a token's embedding and one hidden state"
    if kind in AUXILIARY:
        _check_vocabulary(draft, head, target.get_vocab_size(), kind)
        ids = _check_auxiliary(draft, head, target, kind)
        states, what = len(ids), f"the auxiliary states of {len(ids)} layers {list(ids)}"
    for name in ("fc.weight", "mask_hidden"):
        shape = (draft.tensors or {}).get(name)
        if kind != "mtp" and states and shape is not None and shape[-1] != states * size:
            raise draft.refused(
                f"joins inputs of {shape[-1]} ({name}), and {what} of this target have {states * size}; use a head "
                "trained for this target"
            )
    if kind in one_forward.CLASSES and config.use_v2_model_runner and spec.num_speculative_tokens <= (levels or 0):
        raise ValueError(
            f"speculative_config['num_speculative_tokens']={spec.num_speculative_tokens} is too small on Model Runner "
            f"V2 for a head that predicts {levels} tokens at once, each with a slot of the cache; give at least "
            f"{1 + (levels or 0)}"
        )
    if kind in one_forward.CLASSES and config.use_v2_model_runner:
        one_forward_checks.check_room(config.scheduler_config, kind, one_forward.rows_of(draft, kind, levels or 1))


def _check_vocabulary(draft: Checkpoint, head: Any, vocabulary: int, kind: str) -> None:
    reduced = getattr(head, "draft_vocab_size", None) or vocabulary
    if reduced > vocabulary:
        raise draft.refused(
            f"drafts from {reduced} tokens (draft_vocab_size), and the target has {vocabulary}; use a head trained for "
            "this target"
        )
    if draft.tensors is None:
        return
    if reduced < vocabulary and "d2t" not in draft.tensors:
        raise draft.refused(
            f"drafts from {reduced} of {vocabulary} tokens (draft_vocab_size), and has no tensor 'd2t' that says "
            "which; use a complete checkpoint"
        )
    if reduced < vocabulary and kind in one_forward.CLASSES and "lm_head.weight" not in draft.tensors:
        raise draft.refused(
            f"drafts from {reduced} of {vocabulary} tokens (draft_vocab_size), and has no tensor 'lm_head.weight' of "
            "its own; use a complete checkpoint"
        )
    if reduced == vocabulary and "d2t" in draft.tensors:
        raise draft.refused(
            f"drafts from all {vocabulary} tokens (draft_vocab_size), and has a tensor 'd2t', which vLLM then cannot "
            "load; remove 'd2t' from the file, or correct draft_vocab_size in its config.json"
        )


def _check_auxiliary(draft: Checkpoint, head: Any, target: Any, kind: str) -> tuple[int, ...]:
    """How many of the target's layers lie below each auxiliary state; none for a head that reads the last state."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    of_eagle = getattr(head, "eagle_config", None) or {}
    if not of_eagle.get("use_aux_hidden_state", True):
        return ()
    cls, _ = target.registry.resolve_model_cls(target.architectures, target)
    if not supports_eagle3(cls):
        raise draft.refused(
            f"is {NAMES[kind]}, and the target ({cls.__name__}) gives no auxiliary hidden states in this vLLM; use "
            "an EAGLE head, an independent model, or 'ngram'"
        )
    layers, key = target.get_total_num_hidden_layers(), "eagle_aux_hidden_state_layer_ids"
    own = getattr(head, key, None) or of_eagle.get(key)
    if kind in one_forward.CLASSES:
        key, own = "target_layer_ids, counted from 1", one_forward.states_of(draft.config)
        if not own:
            raise draft.refused(
                f"does not say which layers of the target {NAMES[kind]} reads; set target_layer_ids in its config.json"
            )
    ids = tuple(own or (2, layers // 2, layers - 3))  # as vLLM has it
    if any(one >= other for one, other in pairwise(ids)) or ids[0] < 0 or ids[-1] > layers:
        raise draft.refused(
            f"reads the target's layers {list(ids)} ({key}{'' if own else ', by default'}), which must increase from "
            f"0 to at most {layers}, the target's number of layers; use a head trained for this target"
        )
    return ids


def _unreadable(model: str, error: Exception) -> ValueError:
    own = ', or tree: {"draft": "mtp"} for the target\'s own MTP layers' if model == "mtp" else ""
    return ValueError(
        f"speculative_config['model']: cannot read a draft at {model!r}; give a local folder or a hub name with a "
        f"config.json{own} ({type(error).__name__}: {error}); {served()}"
    )
