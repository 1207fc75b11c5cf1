"""What a draft's checkpoint holds, by the names of its tensors; no weight is read."""

import json
import pickle
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

PREFIXES = ("model.", "module.")
OF_HEADS = {
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
"""Modules that an independent model has not at its top level."""
EMBEDDINGS = ("emb", "wte")
"""Substrings of the names of token embeddings, in every family of models."""


def tensor_names(model: str, revision: str | None = None) -> set[str] | None:
    """Names of all tensors of a local folder or a hub model; None where they cannot be told without its weights."""
    folder = Path(model) if Path(model).is_dir() else _cached(model, revision)
    names = None if folder is None else _in_folder(folder)
    return names or (None if Path(model).is_dir() else _on_hub(model, revision))


def why_a_head(names: Iterable[str]) -> str | None:
    """What shows that tensors of these names are no model that drafts by itself; None if nothing does."""
    names = sorted(names)
    for name in names:
        module = _without_prefix(name).partition(".")[0]
        if module in OF_HEADS or module.isdecimal():
            return f"tensor {name!r}, as {OF_HEADS.get(module, 'Medusa heads')}"
    if names and not any(part in name for name in names for part in EMBEDDINGS):
        return f"no token embedding among its tensors ({', '.join(names[:3])}, ...)"
    return None


def _without_prefix(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _in_folder(folder: Path) -> set[str]:
    """Names in the files that vLLM would load: safetensors before pickles, an index before the files that it lists."""
    for pattern, read in (("*.safetensors", _of_safetensors), ("pytorch_model*.bin", _of_pickle)):
        if indices := sorted(folder.glob(f"{pattern}.index.json")):
            return {name for index in indices for name in _of_index(index)}
        if files := sorted(folder.glob(pattern)):
            return {name for file in files for name in read(file)}
    return set()


def _of_index(file: Path) -> set[str]:
    try:
        return set(json.loads(file.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError):  # vLLM's loader says what is wrong
        return set()


def _of_safetensors(file: Path) -> set[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return set(opened.keys())
    except SafetensorError:  # vLLM's loader says what is wrong
        return set()


def _of_pickle(file: Path) -> set[str]:
    try:
        return set(torch.load(file, map_location="meta", mmap=True, weights_only=True))
    except (RuntimeError, ValueError, pickle.UnpicklingError):  # written before torch 1.6, or no checkpoint
        return set()


def _cached(model: str, revision: str | None) -> Path | None:
    """The folder of what is cached of a hub model; asks nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _on_hub(model: str, revision: str | None) -> set[str] | None:
    """Of a model that is not cached: the hub tells the headers of safetensors by themselves."""
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    try:
        return set(huggingface_hub.get_safetensors_metadata(model, revision=revision).weight_map)
    except Exception:  # no such files, no access, no network: vLLM's own loader says what is wrong
        return None
