"""Heads with random weights for the bundled target, in the formats that people publish."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.engines import TARGET

CONFIG: dict[str, Any] = json.loads((Path(TARGET) / "config.json").read_text())
HIDDEN, INNER, VOCABULARY = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
QUERIES, KEYS = (CONFIG[name] * CONFIG["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
REDUCED = 512


def eagle(folder: Path) -> str:
    """EAGLE (1): it says no more of itself than that it is a Llama of one layer."""
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
    config = {**_config(), "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": size}
    return _written(folder, config, weights)


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


def _written(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def mtp(folder: Path) -> str:
    """A target as MiMo-7B, a Qwen2 with one layer more for the token after the next; random too."""
    width, inner, head = 64, 128, 16
    norms = ("input_layernorm", "post_attention_layernorm")
    shapes = {
        "self_attn.q_proj": (4 * head, width),
        "self_attn.k_proj": (2 * head, width),
        "self_attn.v_proj": (2 * head, width),
        "self_attn.o_proj": (width, 4 * head),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    weights = {
        "model.embed_tokens.weight": _random(20, VOCABULARY, width),
        "model.norm.weight": torch.ones(width),
        "lm_head.weight": _random(21, VOCABULARY, width),
        "model.mtp_layers.0.input_proj.weight": _random(22, width, 2 * width),
    }
    for at, layer in enumerate(("layers.0", "layers.1", "mtp_layers.0")):
        name = f"model.{layer}"
        weights |= {f"{name}.{part}.weight": _random(30 + at, *shape) for part, shape in shapes.items()}
        weights |= {
            f"{name}.self_attn.{part}_proj.bias": torch.zeros(shapes[f"self_attn.{part}_proj"][0]) for part in "qkv"
        }
        weights |= {f"{name}.{norm}.weight": torch.ones(width) for norm in norms}
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"model.mtp_layers.0.{norm}.weight"] = torch.ones(width)
    config = {
        "model_type": "qwen2",
        "architectures": ["MiMoForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for tokenizer in Path(TARGET).glob("*token*"):
        shutil.copy(tokenizer, folder)
    return _written(folder, config, weights)
