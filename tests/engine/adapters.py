"""LoRA adapters of random weights for the bundled target."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

RANK = 8


def adapter(folder: Path, model: str, *, seed: int, scale: float) -> str:
    """Write an adapter of every projection of every layer; `scale`: of the second factor."""
    config = AutoConfig.from_pretrained(model)
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = (config.head_dim * heads for heads in (config.num_attention_heads, config.num_key_value_heads))
    shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, (rows, columns) in shapes.items():
            place = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / columns**0.5
            weights[f"{place}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * scale
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": [name.split(".")[1] for name in shapes],
        "base_model_name_or_path": model,
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return str(folder)
