"""What is checked of a head that predicts all levels in one forward, beside what is of any draft."""

from importlib.util import find_spec
from typing import Any

from vllm_adaptive_tree.config import served
from vllm_adaptive_tree.engine import one_forward
from vllm_adaptive_tree.engine.checkpoint import Checkpoint
from vllm_adaptive_tree.engine.draft_kind import NAMES


def check_medusa_is_there(draft: Checkpoint) -> None:
    from vllm import __version__

    if find_spec("vllm.v1.spec_decode.medusa") is None:
        raise draft.refused(
            f"has Medusa heads, which vLLM {__version__} no longer runs; use another draft, or vLLM 0.32"
        )


def check_runs_on_v1(draft: Checkpoint, kind: str, *, v2: bool) -> None:
    """Heads that vLLM has on one model runner. `v2`: whether Model Runner V2 is asked for, or has been chosen."""
    from vllm.platforms import current_platform

    if kind in ("medusa", "peagle") and (v2 or not current_platform.is_cpu()):
        raise draft.refused(
            f"is {NAMES[kind]}, which vLLM runs on Model Runner V1 alone, on CPUs; use another draft, or set "
            "VLLM_USE_V2_MODEL_RUNNER=0 on a CPU"
        )


def check_adapters(config: Any, draft: Checkpoint, kind: str) -> None:
    if kind == "lilicorr" and config.use_v2_model_runner and config.lora_config is not None:
        raise draft.refused(
            f"is {NAMES[kind]}, which on Model Runner V2 reads an embedding without LoRA; remove enable_lora, or use "
            "another draft"
        )


def check_medusa(draft: Checkpoint, sizes: list[int]) -> None:
    """`sizes`: vocabularies of its config and of the target; the former is vLLM's default if the file has none."""
    if "vocab_size" not in draft.config:
        rows = [shape[0] for name, shape in (draft.tensors or {}).items() if "lm_head" in name and shape]
        sizes[0] = rows[0] if rows else sizes[1]


def check_block_head(draft: Checkpoint, kind: str, built: Any, vocabulary: int) -> None:
    """What vLLM does not check of a head with a block, checks too late, or cannot do with trees. `built`: its own
    reading of the config, where the layers are those of the model, also in the format of speculators."""
    from vllm.platforms import current_platform

    config = draft.config
    own = {**(config.get("transformer_layer_config") or {}), **config, **(config.get("dflash_config") or {})}
    layers = {*(own.get("layer_types") or ()), *(getattr(built, "layer_types", None) or ())}
    if not current_platform.is_cpu():
        raise draft.refused(f"is {NAMES[kind]}, not served on GPUs yet; use an EAGLE-3 head or an independent model")
    said, known = config.get("architectures") or ["none"], {one_forward.CLASSES[kind]}
    if kind == "dspark" and config.get("model_type") == "qwen3":
        known.add(one_forward.DENSE_DSPARK)
    if "speculators_model_type" not in config and not known & set(said):
        raise draft.refused(
            f"is {NAMES[kind]} of architecture {', '.join(map(repr, said))}, not served yet; this release serves "
            f"{one_forward.CLASSES[kind]!r}"
        )
    check_mask(draft, vocabulary)
    for refused, what in (
        ("sliding_attention" in layers or own.get("use_swa"), "sliding-window attention"),
        (own.get("attention_sink_bias") or own.get("add_swa_attention_sink_bias"), "attention sinks"),
        (own.get("use_aux_hidden_state") is False, "no auxiliary states of the target (use_aux_hidden_state false)"),
        (kind != "dspark" and own.get("sample_from_anchor"), "predictions from the root's row (sample_from_anchor)"),
        (own.get("markov_head_type", "vanilla") != "vanilla", f"a Markov head of type {own.get('markov_head_type')!r}"),
        (kind == "dspark" and not own.get("markov_rank"), "no markov_rank"),
        *((own.get(key) in (None, 0), f"no {key}") for key in one_forward.OF_PAIRS.get(kind, ())),
        (kind == "lilicorr" and "lilicorr_hidden_size" not in own, "no lilicorr_hidden_size (null: the head's own)"),
        (
            kind in one_forward.OF_PAIRS and (own.get("draft_vocab_size") or vocabulary) != vocabulary,
            "a reduced vocabulary (draft_vocab_size)",
        ),
    ):
        if refused:
            raise draft.refused(f"is {NAMES[kind]} with {what}, not served yet; {served()}")


def check_mask(draft: Checkpoint, vocabulary: int) -> None:
    mask = one_forward.mask_token(draft.config)
    if not isinstance(mask, int) or not 0 <= mask < vocabulary:
        raise draft.refused(
            f"names no token for the positions that it predicts (mask_token_id {mask!r} in its config.json, of "
            f"{vocabulary} tokens); set mask_token_id to the one that it was trained with"
        )


def check_room(scheduler: Any, kind: str, rows: int) -> None:
    """vLLM writes the blocks of all requests to buffers of one step's tokens, and checks no bound."""
    requests, room = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if requests * rows > room:
        raise ValueError(
            f"max_num_seqs={requests} does not fit max_num_batched_tokens={room} on Model Runner V2: {NAMES[kind]} "
            f"reads {rows} tokens of every request in one forward, {requests * rows} of all; lower the first to "
            f"{room // rows}, or raise the second to {requests * rows}"
        )
