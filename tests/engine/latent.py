"""Checkpoints of multi-head latent attention with an MTP module."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def with_module(model: str, folder: Path) -> str:
    """The checkpoint with an MTP module of the weights of its last layer."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    weights = load_file(folder / "model.safetensors")
    last, own = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    norm = weights["model.norm.weight"]
    module = {name.replace(last, own): one for name, one in weights.items() if name.startswith(last)}
    module |= dict.fromkeys((f"{own}enorm.weight", f"{own}hnorm.weight", f"{own}shared_head.norm.weight"), norm)
    module[f"{own}eh_proj.weight"] = torch.eye(len(norm), dtype=norm.dtype).repeat(1, 2) / 2
    module[f"{own}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    module[f"{own}shared_head.head.weight"] = weights["lm_head.weight"]
    save_file({**weights, **{name: one.clone() for name, one in module.items()}}, folder / "model.safetensors")
    return str(folder)
