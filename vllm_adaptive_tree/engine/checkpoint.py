"""Metadata of a checkpoint: its config.json, and the names and shapes of its tensors; no weight is read."""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

PREFIXES = ("model.", "module.")
MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Keys for the mask token, in vLLM's order."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    model: str
    """Local folder or hub name."""
    config: dict[str, Any]
    """The config.json as it is written; vLLM's own reading of it drops unknown keys."""
    tensors: dict[str, Shape | None] | None
    """Names without `PREFIXES` -> shapes, None where only an index was read; None: not known without the weights."""

    @classmethod
    def read(cls, model: str, revision: str | None, trust_remote_code: bool) -> "Checkpoint":
        """Read a checkpoint. Raises whatever Transformers raises if there is no config."""
        return cls(model, written_config(model, revision, trust_remote_code), tensor_shapes(model, revision))

    @property
    def flat(self) -> dict[str, Any]:
        """Keys of the config.json with those of a head's sections."""
        config = self.config
        return {**(config.get("transformer_layer_config") or {}), **config, **(config.get("dflash_config") or {})}

    @property
    def mask_token(self) -> Any:
        """Token at the positions that a head predicts; None: the config.json does not say."""
        merged = self.flat
        return next((merged[key] for key in MASKS if merged.get(key) is not None), None)

    def refused(self, why: str) -> ValueError:
        return ValueError(f"speculative_config['model']: {self.model!r} {why}")


def written_config(model: str, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    from transformers import PreTrainedConfig
    from vllm.transformers_utils.config import get_config

    try:
        written: dict[str, Any] = PreTrainedConfig.get_config_dict(model, revision=revision)[0]
    except OSError:  # a format without a config.json, Mistral's own for example
        if Path(model).is_absolute() and not Path(model).is_dir():
            raise FileNotFoundError(f"there is no folder {model!r}") from None
        written = get_config(model, trust_remote_code, revision=revision).to_dict()
    return written


def tensor_shapes(model: str, revision: str | None = None, *, ask_hub: bool = True) -> dict[str, Shape | None] | None:
    """Shapes of all tensors of a local folder or a hub model; None if they cannot be read without its weights."""
    folder = local_folder(model, revision)
    shapes = (folder and _in_folder(folder)) or (
        _on_hub(model, revision) if ask_hub and not Path(model).is_dir() else None
    )
    return None if shapes is None else {_without_prefix(name): shape for name, shape in shapes.items()}


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """Folder with the files of a model on this machine; None: there is none."""
    return Path(model) if Path(model).is_dir() else _cached(model, revision)


def _without_prefix(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _in_folder(folder: Path) -> dict[str, Shape | None]:
    """Shapes in the files that vLLM would load: safetensors before pickles, of these the files that an index lists."""
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        files, shapes = sorted(folder.glob(pattern)), dict[str, Shape | None]()
        if indices := sorted(folder.glob(f"{pattern}.index.json")):
            listed = {name: file for index in indices for name, file in _listed(index).items()}
            files, shapes = sorted({folder / file for file in listed.values()}), dict.fromkeys(listed)
        for file in files:
            shapes |= _in_file(file)
        if files:
            return shapes
    return {}


def _listed(index: Path) -> dict[str, str]:
    """Tensor -> its file; empty if there is no such index."""
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _in_file(file: Path) -> dict[str, Shape | None]:
    """Shapes in a file; empty if it cannot be read, or a pickle is older than torch 1.6: vLLM's loader reports that."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        loaded = torch.load(file, map_location="meta", mmap=True, weights_only=True)
        return {name: tuple(weight.shape) for name, weight in loaded.items()}
    except (OSError, ValueError, AttributeError, RuntimeError, SafetensorError, pickle.UnpicklingError):
        return {}


def _cached(model: str, revision: str | None) -> Path | None:
    """Folder of a cached hub model; without network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _on_hub(model: str, revision: str | None) -> dict[str, Shape | None] | None:
    """Shapes of a model that is not cached: the hub serves the headers of safetensors by themselves."""
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return None
    try:
        files = huggingface_hub.get_safetensors_metadata(model, revision=revision).files_metadata.values()
    except Exception:  # no such files, no access, no network: vLLM's own loader reports it
        return None
    return {name: tuple(tensor.shape) for file in files for name, tensor in file.tensors.items()}


def why_absent(model: str) -> str | None:
    """The hub and what it answers, if a model is neither here nor there; None: it is, or has no config.json of its own,
    and is vLLM's to judge. The hub is asked once: without a network an engine asks it for five minutes."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    if local_folder(model, None) is not None:
        return None
    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json"))
    except (EntryNotFoundError, HFValidationError):
        return None
    except Exception as error:  # the hub's, and those of its library for HTTP, which is not always the same
        return f"{constants.ENDPOINT}: {error}"
    return None
