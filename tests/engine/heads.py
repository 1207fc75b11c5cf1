"""Heads with random weights for the bundled target, in the formats that people publish."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.engines import TARGET, V2

CONFIG: dict[str, Any] = json.loads((Path(TARGET) / "config.json").read_text())
HIDDEN, INNER, VOCABULARY = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
QUERIES, KEYS = (CONFIG[name] * CONFIG["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
REDUCED = 512

MODELS = Path(str(find_spec("vllm").origin)).parent / "model_executor" / "models"  # type: ignore[union-attr]
XPRESS = (MODELS / "qwen3_xpress.py").exists()
"""True if vLLM has these heads, from 0.33 on."""
ON_V1 = pytest.mark.skipif(V2, reason="vLLM has these heads on Model Runner V1 alone")


def eagle(folder: Path) -> str:
    """EAGLE (1), whose config.json names only a Llama of one layer."""
    weights = {
        "fc.weight": _random(0, HIDDEN, 2 * HIDDEN),
        **_layer("layers.0", HIDDEN),
        "layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    return _written(folder, {**_config(), "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}, weights)


def eagle3(folder: Path, *, reduced: bool = False, vocabulary: Tensor | None = None) -> str:
    """EAGLE-3 with the target's vocabulary, with every fourth of its first tokens, or with these."""
    if reduced:
        vocabulary = torch.arange(0, VOCABULARY, 4)[:REDUCED]
    return _written(folder, *_eagle3(vocabulary))


FOUR = [1, 3, 5, 7]
"""Layers of the target that are not vLLM's default, one more than those."""


def eagle3_1(folder: Path) -> str:
    """EAGLE-3.1: a norm before `fc`, and the normed state is fed back. The layers are named where vLLM's class of it
    does not look, the norms where it looks for one of them."""
    config, weights = _eagle3(None)
    weights |= {"fc.weight": _random(1, HIDDEN, 4 * HIDDEN), "input_norm.weight": torch.ones(4 * HIDDEN)}
    norms = {"norm_before_fc": True, "norm_output": True}
    return _written(folder, {**config, "eagle_aux_hidden_state_layer_ids": FOUR, "eagle_config": norms}, weights)


def eagle3_of_the_last_state(folder: Path) -> str:
    """EAGLE-3 that reads no states of layers, like NVIDIA's heads for gpt-oss."""
    config, weights = _eagle3(None)
    del weights["fc.weight"]
    return _written(folder, {**config, "eagle_config": {"use_aux_hidden_state": False}}, weights)


def _eagle3(vocabulary: Tensor | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and weights of an EAGLE-3 head."""
    size = VOCABULARY if vocabulary is None else len(vocabulary)
    weights = {
        "fc.weight": _random(1, HIDDEN, 3 * HIDDEN),
        **_layer("midlayer", 2 * HIDDEN),
        **{
            f"midlayer.{name}.weight": torch.ones(HIDDEN)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _random(2, size, HIDDEN),
    }
    if vocabulary is not None:
        weights |= {"d2t": vocabulary - torch.arange(size), "t2d": torch.zeros(VOCABULARY, dtype=torch.bool)}
        weights["t2d"][vocabulary] = True
    return {**_config(), "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": size}, weights


def peagle(folder: Path, *, vocabulary: Tensor | None = None, **changes: Any) -> str:
    """P-EAGLE: EAGLE-3 of two layers, and the state of its mask tokens; of a reduced vocabulary, or with other keys."""
    config, weights = _eagle3(vocabulary)
    weights |= {**_layer("layers.1", HIDDEN), "mask_hidden": _random(60, 1, 1, 3 * HIDDEN)}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"layers.1.{name}.weight"] = torch.ones(HIDDEN)
    own = {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 2, "ptd_token_id": 0, "num_depths": DEPTH}
    return _written(folder, {**config, **own, **changes}, weights)


AUXILIARY = 3, 6
"""Numbers of the target's layers below the states that a DFlash or DSpark head of these reads."""
DEPTH = 5
"""Tokens that such a head predicts."""


DFLASH: dict[str, Any] = {
    **CONFIG,
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
    "block_size": 1 + DEPTH,
    "dflash_config": {"mask_token_id": 0, "target_layer_ids": [one - 1 for one in AUXILIARY]},
}


def dflash(folder: Path, *, vocabulary: Tensor | None = None, **changes: Any) -> str:
    """DFlash of two layers; of a reduced vocabulary, or with other keys."""
    return _written(folder, {**DFLASH, **changes}, _block(vocabulary), vocabulary)


def dspark(folder: Path, *, vocabulary: Tensor | None = None, scale: float = 0.5, **changes: Any) -> str:
    """DSpark: the same layers, with a prediction from the root's row and a bias by the parent token, whose standard
    deviation is four times the square of `scale`."""
    size = VOCABULARY if vocabulary is None else len(vocabulary)
    markov = {
        "markov_head.markov_w1.weight": scale / 0.05 * _random(50, VOCABULARY, 16),
        "markov_head.markov_w2.weight": scale / 0.05 * _random(51, size, 16),
    }
    config = {**DFLASH, "architectures": ["Qwen3DSparkModel"], "markov_rank": 16, "block_size": DEPTH, **changes}
    return _written(folder, config, {**_block(vocabulary), **markov}, vocabulary)


def dspark_fill_in(folder: Path) -> str:
    """DSpark whose root predicts nothing."""
    return dspark(folder, sample_from_anchor=False, block_size=1 + DEPTH)


SELECTOR = {"conv_kernel_size": 3, "conv_group_size": 32, "selector_rank": 16, "selector_top_k": 16}


def dflash2(folder: Path, *, scale: float = 1.0, **changes: Any) -> str:
    """DFlash2: the same layers with convolutions along the block, and scores of pairs of candidates; `scale`: of the
    vectors whose products those are."""
    weights = _block(None)
    for at, (layer, part) in enumerate(product(range(2), ("attention", "mlp"))):
        name = f"layers.{layer}.{part}_conv"
        base = torch.zeros(2, SELECTOR["conv_kernel_size"], HIDDEN)
        base[:, 0] = 1.0
        taps = 2 * SELECTOR["conv_kernel_size"] * HIDDEN // SELECTOR["conv_group_size"]
        weights[f"{name}.base_kernel"] = base + _random(70 + at, *base.shape)
        weights[f"{name}.kernel_projection.weight"] = _random(80 + at, taps, HIDDEN)
    for at, side in enumerate(("predecessor", "successor")):
        weights[f"candidate_selector.{side}_codebook"] = scale / 0.05 * _random(90 + at, VOCABULARY, 16)
    weights["candidate_selector.hidden_projection.weight"] = _random(92, 16, HIDDEN)
    own = {**DFLASH, "architectures": ["DFlash2DraftModel"], "dflash_config": {**DFLASH["dflash_config"], **SELECTOR}}
    return _written(folder, {**own, **changes}, weights)


def xpress(folder: Path, *, most: int = 0) -> str:
    """XPress: the same layers, and a refiner; over the `most` best tokens of each depth, 0 for all."""
    places, rank, inner = 1 + DEPTH, 16, 64
    shapes = {
        "w1.weight": (VOCABULARY, rank),
        "down_h.weight": (rank, HIDDEN),
        "down_g.weight": (rank, HIDDEN),
        "in_proj.weight": (rank, 3 * rank),
        "mix.L": (rank, places, places),
        "mlp.gate_proj.weight": (inner, rank),
        "mlp.up_proj.weight": (inner, rank),
        "mlp.down_proj.weight": (rank, inner),
        "w2.weight": (VOCABULARY, rank),
    }
    weights = {f"xpress_head.{name}": 4 * _random(130 + at, *shape) for at, (name, shape) in enumerate(shapes.items())}
    weights["xpress_head.w2.weight"] /= 4
    own = {"xpress_block_size": places, "xpress_rank": rank, "xpress_mlp_hidden": inner, "xpress_topc": most}
    return _written(folder, {**DFLASH, **own, "architectures": ["Qwen3XPressModel"]}, {**_block(None), **weights})


CORRELATOR: dict[str, Any] = {
    "lilicorr_hidden_size": 32,
    "lilicorr_candidate_topk": 16,
    "lilicorr_num_layers": 1,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2.0,
    "lilicorr_factor_dim": 8,
    "lilicorr_vector_eps": 1e-6,
    "lilicorr_logit_scale": 6.0,
}


def lilicorr(folder: Path, **changes: Any) -> str:
    """LiLiCorr: the same layers, and a small network over all candidates that scores their pairs."""
    inner = CORRELATOR["lilicorr_hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "slot_embedding": (1, 1, DEPTH, 1, inner),
        "rank_embedding": (1, 1, 1, CORRELATOR["lilicorr_candidate_topk"], inner),
        "relative_slot_bias": (2, 2 * (1 + DEPTH) - 1),
        "same_slot_bias": (2,),
        "layers.0.attn.in_proj_weight": (3 * inner, inner),
        "layers.0.attn.in_proj_bias": (3 * inner,),
    }
    linear = {
        "token_proj": (inner, HIDDEN),
        "pass_hidden_proj": (inner, HIDDEN),
        "context_proj": (inner, HIDDEN),
        "feature_mlp.up_proj": (inner, 5),
        "feature_mlp.down_proj": (inner, inner),
        "layers.0.attn.out_proj": (inner, inner),
        "layers.0.mlp.up_proj": (2 * inner, inner),
        "layers.0.mlp.down_proj": (inner, 2 * inner),
        "factor_input_proj": (inner, 3 * inner),
        "out_head": (CORRELATOR["lilicorr_factor_dim"], inner),
        "in_head": (CORRELATOR["lilicorr_factor_dim"], inner),
        "anchor_out_head": (CORRELATOR["lilicorr_factor_dim"], inner),
    }
    for name, (rows, columns) in linear.items():
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    weights = {name: 4 * _random(100 + at, *shape) for at, (name, shape) in enumerate(shapes.items())}
    norms = ("output_norm", "anchor_norm", "layers.0.attn_norm", "layers.0.mlp_norm")
    weights |= {f"{name}.weight": torch.ones(inner) for name in norms}
    weights |= {"feature_norm.weight": torch.ones(5), "feature_norm.bias": torch.zeros(5)}
    own = {
        **DFLASH,
        "architectures": ["LiLiCorrDraftModel"],
        "dflash_config": {**DFLASH["dflash_config"], **CORRELATOR},
    }
    named = {f"lilicorr.{name}": weight for name, weight in weights.items()}
    return _written(folder, {**own, **changes}, {**_block(None), **named})


def _block(vocabulary: Tensor | None) -> dict[str, Tensor]:
    weights = {"fc.weight": _random(52, HIDDEN, len(AUXILIARY) * HIDDEN)}
    for name in ("hidden_norm", "norm"):
        weights[f"{name}.weight"] = torch.ones(HIDDEN)
    for at in range(2):
        weights |= _layer(f"layers.{at}", HIDDEN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"layers.{at}.{name}.weight"] = torch.ones(HIDDEN)
        for name in "qk":
            weights[f"layers.{at}.self_attn.{name}_norm.weight"] = 1 + at + _random(54 + at, CONFIG["head_dim"])
    return weights if vocabulary is None else {**weights, "lm_head.weight": _random(53, len(vocabulary), HIDDEN)}


def _config() -> dict[str, Any]:
    return {**CONFIG, "num_hidden_layers": 1, "tie_word_embeddings": False}


def _layer(name: str, width: int) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (QUERIES, width),
        "self_attn.k_proj": (KEYS, width),
        "self_attn.v_proj": (KEYS, width),
        "self_attn.o_proj": (HIDDEN, QUERIES),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    return {f"{name}.{part}.weight": _random(3 + at, *shape) for at, (part, shape) in enumerate(shapes.items())}


def _random(seed: int, *shape: int) -> Tensor:
    return 0.05 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _written(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], vocabulary: Tensor | None = None) -> str:
    if vocabulary is not None:
        config = {**config, "draft_vocab_size": len(vocabulary)}
        weights = {**weights, "d2t": vocabulary - torch.arange(len(vocabulary))}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def mtp(folder: Path) -> str:
    """A target like MiMo-7B, a Qwen2 of two layers with one more for the token after the next; random too."""
    weights = {
        "model.embed_tokens.weight": _random(20, VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _random(21, VOCABULARY, HIDDEN),
        "model.mtp_layers.0.input_proj.weight": _random(22, HIDDEN, 2 * HIDDEN),
    }
    for name in ("model.layers.0", "model.layers.1", "model.mtp_layers.0"):
        weights |= _layer(name, HIDDEN)
        weights |= {f"{name}.{norm}_layernorm.weight": torch.ones(HIDDEN) for norm in ("input", "post_attention")}
        for part, size in (("q", QUERIES), ("k", KEYS), ("v", KEYS)):
            weights[f"{name}.self_attn.{part}_proj.bias"] = torch.zeros(size)
    for norm in ("token", "hidden", "final"):
        weights[f"model.mtp_layers.0.{norm}_layernorm.weight"] = torch.ones(HIDDEN)
    config = {
        **CONFIG,
        "model_type": "qwen2",
        "architectures": ["MiMoForCausalLM"],
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
    _written(folder, config, weights)
    for file in Path(TARGET).glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


THREE_OF_FOUR = torch.arange(VOCABULARY)[torch.arange(VOCABULARY) % 4 != 3]
HEADS: dict[str, Callable[[Path], str]] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "eagle3 reduced": partial(eagle3, reduced=True),
    "eagle3 last state": eagle3_of_the_last_state,
    "eagle3.1": eagle3_1,
    "peagle": peagle,
    "peagle reduced": partial(peagle, vocabulary=THREE_OF_FOUR),
    "dflash": dflash,
    "dflash causal": partial(dflash, dflash_config={**DFLASH["dflash_config"], "causal": True}),
    "dflash reduced": partial(dflash, vocabulary=THREE_OF_FOUR),
    "dflash2": dflash2,
    "lilicorr": lilicorr,
    "dspark": dspark,
    "dspark fill-in": dspark_fill_in,
    "dspark candidates": partial(dspark, dspark_draft_topk=64),
    "dspark reduced": partial(dspark, vocabulary=THREE_OF_FOUR),
}
"""Name, which begins with the kind -> what writes such a checkpoint into a folder."""
if XPRESS:
    HEADS |= {"xpress": xpress, "xpress candidates": partial(xpress, most=512)}
