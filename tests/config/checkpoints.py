"""Checkpoints of every kind that is detected from config.json and the shapes of tensors; all weights are 0."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.engine.arg_utils import EngineArgs

from tests.engine.engines import TARGET, tree
from tests.engine.heads import CONFIG, HIDDEN, VOCABULARY

ONE_LAYER = {**CONFIG, "num_hidden_layers": 1, "tie_word_embeddings": False}
SILENT = {**ONE_LAYER, "architectures": ["LlamaForCausalLM"]}
EAGLE3 = {**ONE_LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCABULARY}
DFLASH = {"model_type": "qwen3", "dflash_config": {"mask_token_id": 0, "target_layer_ids": [2, 5]}, "block_size": 8}

Shapes = dict[str, tuple[int, ...]]
EAGLE_TENSORS: Shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), "layers.0.self_attn.q_proj.weight": (8, 8)}
EAGLE3_TENSORS: Shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "midlayer.hidden_norm.weight": (HIDDEN,)}
PEAGLE_TENSORS: Shapes = {**EAGLE3_TENSORS, "mask_hidden": (1, 1, 3 * HIDDEN)}
DFLASH_TENSORS: Shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), "hidden_norm.weight": (HIDDEN,)}
DSPARK_TENSORS: Shapes = {**DFLASH_TENSORS, "markov_head.markov_w1.weight": (VOCABULARY, 16)}
DFLASH2_TENSORS: Shapes = {**DFLASH_TENSORS, "candidate_selector.predecessor_codebook": (VOCABULARY, 16)}
WHOLE: Shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}


def speculators(kind: str, **more: Any) -> dict[str, Any]:
    """A config.json of the library `speculators`."""
    verifier = {"name_or_path": TARGET, "architectures": CONFIG["architectures"]}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "proposal_methods": methods, "verifier": verifier},
        "transformer_layer_config": {**ONE_LAYER, "model_type": "llama"},
        "draft_vocab_size": VOCABULARY,
        "mask_token_id": 0,
        **({} if kind in ("eagle3", "peagle") else {"aux_hidden_state_layer_ids": [2, 5]}),
        **more,
    }


def written(folder: Path, config: dict[str, Any], tensors: Shapes) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def build(draft: str | None, said: str | None = None, target: str = TARGET, keys: Any = None, **arguments: Any) -> Any:
    """The configuration of an engine. No `draft`: the key is missing; `said`: the kind of the draft in "tree"; `keys`:
    of the speculative_config."""
    spec = {**tree(60, **({} if said is None else {"draft": said})), "model": draft, **(keys or {})}
    if draft is None:
        del spec["model"]
    return EngineArgs(
        model=target, speculative_config=spec, **{"max_model_len": 512, **arguments}
    ).create_engine_config()
