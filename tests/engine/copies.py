"""Copies of the bundled models with another vocabulary, or another longest context."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def padded(model: str, size: int, folder: Path) -> str:
    """Copy with rows after those of the tokenizer, which a sampler may choose."""
    changed(model, folder, vocab_size=size)
    weights = load_file(folder / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    own = weights[name]
    rows = torch.randperm(len(own), generator=torch.Generator().manual_seed(0))[: size - len(own)]
    save_file({**weights, name: torch.cat([own, 0.9 * own[rows]])}, folder / "model.safetensors")
    return str(folder)


def changed(model: str, folder: Path, **keys: object) -> str:
    """Copy with other keys in its config.json."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return str(folder)
