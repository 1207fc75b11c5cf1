"""The tensor names of a draft's checkpoint, and what they say about it; no weight is read."""

import json
import pickle
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

PREFIXES = ("model.", "module.")
HEAD_MODULES = {
    "fc": "an EAGLE or DFlash head: joins token and target state",
    "midlayer": "an EAGLE-3 head",
    "d2t": "an EAGLE-3 head: a vocabulary of its own",
    "t2d": "an EAGLE-3 head: a vocabulary of its own",
    "hidden_norm": "an EAGLE-3 or DFlash head",
    "medusa_head": "Medusa heads",
    "medusa_heads": "Medusa heads",
    "lm_heads": "Medusa heads",
    "speculator": "an MLP speculator",
}
"""Modules that an independent model does not have at its top level."""
EMBEDDINGS = ("emb", "wte")
"""Substrings of the names of token embeddings, in every family of models."""


def tensor_names(model: str, revision: str | None = None) -> set[str] | None:
    """Names of all tensors of a local folder or a hub model; None if they cannot be read without its weights."""
    folder = Path(model) if Path(model).is_dir() else _cached(model, revision)
    names = None if folder is None else _in_folder(folder)
    return names or (None if Path(model).is_dir() else _on_hub(model, revision))


def why_a_head(names: Iterable[str]) -> str | None:
    """Why a checkpoint with tensors of these names cannot be an independent model; None if it can."""
    names = sorted(names)
    for name in names:
        module = _without_prefix(name).partition(".")[0]
        if module in HEAD_MODULES or module.isdecimal():
            return f"tensor {name!r}, as {HEAD_MODULES.get(module, 'Medusa heads')}"
    if names and not any(part in name for name in names for part in EMBEDDINGS):
        return f"no token embedding among its tensors ({', '.join(names[:3])}, ...)"
    return None


def _without_prefix(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _in_folder(folder: Path) -> set[str]:
    """Names in the files that vLLM would load: safetensors before pickles, an index before the files that it lists."""
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        if files := sorted(folder.glob(f"{pattern}.index.json")) or sorted(folder.glob(pattern)):
            return {name for file in files for name in _in_file(file)}
    return set()


def _in_file(file: Path) -> Iterable[str]:
    """Empty if the file cannot be read, or a pickle is older than torch 1.6: vLLM's loader says what is wrong."""
    try:
        if file.suffix == ".json":
            return set(json.loads(file.read_text())["weight_map"])
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return set(opened.keys())
        return set(torch.load(file, map_location="meta", mmap=True, weights_only=True))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError, pickle.UnpicklingError):
        return ()


def _cached(model: str, revision: str | None) -> Path | None:
    """The folder of a cached hub model; no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _on_hub(model: str, revision: str | None) -> set[str] | None:
    """Of a model that is not cached: the hub serves the headers of safetensors by themselves."""
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    try:
        return set(huggingface_hub.get_safetensors_metadata(model, revision=revision).weight_map)
    except Exception:  # no such files, no access, no network: vLLM's own loader says what is wrong
        return None
