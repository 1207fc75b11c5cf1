"""Heads of one forward in vLLM's configuration.

vLLM takes `num_speculative_tokens` for the number of tokens that such a head predicts, and builds Medusa heads, query
rows and slots by it. Here it is the node budget, and what a head predicts is its checkpoint's.
"""

import contextlib
import copy
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.engine.checkpoint import Checkpoint

CLASSES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "lilicorr": "LiLiCorrDraftModel",
    "dspark": "Qwen3DSparkModel",
}
"""vLLM's architecture of the heads with a block that are served."""
OF_PAIRS = {
    "dflash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "lilicorr": (
        "lilicorr_candidate_topk",
        "lilicorr_num_layers",
        "lilicorr_num_heads",
        "lilicorr_mlp_ratio",
        "lilicorr_factor_dim",
        "lilicorr_vector_eps",
        "lilicorr_logit_scale",
    ),
}
"""What heads that score pairs of candidates have beside the DFlash head inside of them."""
PARALLEL = {
    "PEagleDraftModel": "Eagle3LlamaForCausalLM",
    "PeagleLlamaForCausalLM": "Eagle3LlamaForCausalLM",
    "PeagleQwen3ForCausalLM": "Eagle3Qwen3ForCausalLM",
}
"""Names of P-EAGLE heads -> vLLM's class of them, under a name that its configuration of EAGLE-3 heads keeps."""
DENSE_DSPARK = "DSparkDraftModel"
"""Another name of it, where `model_type` is qwen3; of DeepSeek's models it is another head."""
HEADS = 5
"""Of a Medusa checkpoint that does not say how many; vLLM's default."""


def levels_of(draft: Checkpoint, kind: str) -> int:
    """Levels of a tree that the checkpoint predicts.

    Raises:
        ValueError: it does not say so, or its tensors say otherwise.
    """
    return {"medusa": _medusa_heads, "peagle": _depths}.get(kind, partial(_block, kind=kind))(draft)


def _depths(draft: Checkpoint) -> int:
    """Of a P-EAGLE head; vLLM predicts as many tokens as the user asks for."""
    methods = (draft.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depths = draft.config.get("num_depths", methods[0].get("speculative_tokens"))
    if not isinstance(depths, int) or depths < 2:
        raise draft.refused(
            f"does not say how many tokens it predicts at once (num_depths {depths!r} in its config.json); set "
            "num_depths to the one that it was trained with, at least 2"
        )
    return depths


def _medusa_heads(draft: Checkpoint) -> int:
    said = _of_medusa(draft.config, "heads")
    heads = HEADS if said is None else said
    found = {int(match[1]) for name in draft.tensors or () if (match := re.match(r"(?:\D*\.)?(\d+)\.", name))}
    if found and found != set(range(heads)):
        raise draft.refused(
            f"has {heads} Medusa heads by its config.json ({'a default' if said is None else 'medusa_num_heads'}), and "
            f"{sorted(found)} by its tensors; correct medusa_num_heads in its config.json"
        )
    return int(heads)


def _of_medusa(config: Mapping[str, Any], what: str) -> Any:
    """Its number of "heads" or "layers"; None: it does not say. vLLM takes the last such number in the file, which may
    be one of the target's attention, in a copy of its config.json."""
    return next((config[key] for key in (f"medusa_num_{what}", f"num_{what}") if config.get(key) is not None), None)


def _block(draft: Checkpoint, kind: str) -> int:
    config = draft.config
    own = {**config, **(config.get("dflash_config") or {})}
    size = own.get("block_size", own.get("dspark_block_size"))
    if not isinstance(size, int) or size < 1 + (kind != "dspark"):
        raise draft.refused(
            f"does not say how many tokens it predicts at once (block_size {size!r} in its config.json); set "
            "block_size to the one that it was trained with"
        )
    return size if kind == "dspark" and samples_anchor(config) else size - 1


def samples_anchor(config: Mapping[str, Any]) -> bool:
    """Whether the row of the root predicts the token after it, in a DSpark head's config.json: without it that row
    predicts nothing, as in DFlash."""
    return bool(config.get("sample_from_anchor", "speculators_model_type" not in config))


def rows_of(draft: Checkpoint, kind: str, levels: int) -> int:
    """Rows of a request in the forward of a DFlash or DSpark head: the root, unless it predicts a level itself, and a
    mask token for each level."""
    return levels if kind == "dspark" and samples_anchor(draft.config) else 1 + levels


def fewest_slots(kind: str, levels: int) -> int:
    """Of the cache that the scheduler must reserve for a request beside the root's, where vLLM's class writes K/V of
    the whole block there: on Model Runner V2. It may be more than a proposer has nodes; elsewhere 0."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    on_v2 = HAS_TRITON and envs.VLLM_USE_V2_MODEL_RUNNER is not False
    return 1 + levels if on_v2 and kind in CLASSES else 0


def mask_token(config: Mapping[str, Any]) -> Any:
    """The token that stands at the positions to predict; None: the config.json does not say."""
    own = {**config, **(config.get("dflash_config") or {})}
    keys = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")  # in vLLM's order
    return next((own[key] for key in keys if own.get(key) is not None), None)


def states_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """How many of the target's layers lie below each state that a head with layers reads; empty: it does not say."""
    if ids := config.get("eagle_aux_hidden_state_layer_ids") or config.get("aux_hidden_state_layer_ids"):
        return tuple(ids)
    own = {**config, **(config.get("dflash_config") or {})}
    return tuple(1 + layer for layer in own.get("target_layer_ids") or own.get("dspark_target_layer_ids") or ())


@contextlib.contextmanager
def built(draft: Checkpoint, kind: str) -> Iterator[str]:
    """A path under which vLLM builds the configuration of a head: of a DFlash2, LiLiCorr or DSpark head, on both model
    runners, as of the DFlash head inside of it; of a P-EAGLE head as of an EAGLE-3 head, which has the same class."""
    config = draft.config
    if "speculators_model_type" in config and kind != "dflash2":
        yield draft.model
        return
    if "speculators_model_type" in config:
        config = config | {"speculators_model_type": "dflash"}
    elif kind == "peagle":
        config = config | {"architectures": [PARALLEL.get(one, one) for one in config.get("architectures") or ()]}
    else:
        layers = [one - 1 for one in states_of(config)]
        own = {"mask_token_id": mask_token(config), "target_layer_ids": layers} | (config.get("dflash_config") or {})
        config = config | {"architectures": [CLASSES["dflash"]], "dflash_config": own}
    with tempfile.TemporaryDirectory(prefix="draft") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


def settle(spec: Any, draft: Checkpoint, kind: str, levels: int) -> None:
    """What vLLM's scheduler and loaders shall know of a head, once the configuration is built.

    To the scheduler it is an EAGLE-3 head, which has the same states and cache, but no slots besides the nodes'; as
    with one its RoPE reaches the end of the target's context. `spec`: vLLM's SpeculativeConfig.
    """
    head = spec.draft_model_config.hf_config
    if kind == "medusa":
        head.num_lookahead_tokens = levels
        head.num_hidden_layers = _of_medusa(draft.config, "layers") or head.num_hidden_layers
        return
    if kind == "peagle":  # the mask tokens have slots of no cache
        return
    if kind == "dspark":
        head.sample_from_anchor = samples_anchor(draft.config)
    if kind in OF_PAIRS:
        keys = (*OF_PAIRS[kind], "lilicorr_hidden_size")
        head.dflash_config |= {key: draft.config[key] for key in keys if key in draft.config}
    if kind != "dflash":
        head.architectures = [CLASSES[kind]]
        spec.update_arch_()
    head.max_position_embeddings = max(head.max_position_embeddings, spec.target_model_config.max_model_len)
    head.eagle_aux_hidden_state_layer_ids = list(states_of(draft.config))
    spec.method, spec.parallel_drafting = "eagle3", False


def as_vllm_drafts(config: Any, kind: str, levels: int) -> Any:
    """A VllmConfig for vLLM's own class of such heads. `kind`: vLLM's method."""
    own = copy.copy(config)
    spec = own.speculative_config = copy.copy(config.speculative_config)
    spec.method, spec.parallel_drafting, spec.num_speculative_tokens = kind, True, levels
    return own
