"""A draft is told by the names of its tensors, whatever its config.json says."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm.engine.arg_utils import EngineArgs

from tests.engine.engines import DRAFT, TARGET, tree
from vllm_adaptive_tree.engine.checkpoint import tensor_names, why_a_head

EAGLE = ("fc.weight", "layers.0.mlp.up_proj.weight", "embed_tokens.weight")


def checkpoint(folder: Path, *names: str, kind: str = "safetensors") -> str:
    """A folder that says it is the demo's draft, a Llama, and holds tensors of these names."""
    folder.mkdir()
    shutil.copy(Path(DRAFT) / "config.json", folder)
    tensors = {name: torch.zeros(1) for name in names}
    half = len(names) // 2
    match kind:
        case "safetensors":
            save_file(tensors, folder / "model.safetensors")
        case "shards":
            save_file({name: tensors[name] for name in names[:half]}, folder / "model-1.safetensors")
            save_file({name: tensors[name] for name in names[half:]}, folder / "model-2.safetensors")
        case "bin":
            torch.save(tensors, folder / "pytorch_model.bin")
            torch.save({"lr": 1}, folder / "training_args.bin")
        case _:  # an index alone: the files that it lists are not looked at
            (folder / kind).write_text(json.dumps({"weight_map": dict.fromkeys(names, "elsewhere")}))
    return str(folder)


def start(draft: str) -> None:
    args = EngineArgs(model=TARGET, speculative_config={**tree(8), "model": draft}, max_model_len=512)
    args.create_engine_config()


@pytest.mark.parametrize(
    "kind", ["safetensors", "shards", "bin", "model.safetensors.index.json", "pytorch_model.bin.index.json"]
)
def test_an_eagle_head_that_calls_itself_a_llama(kind: str, tmp_path: Path) -> None:
    draft = checkpoint(tmp_path / "draft", *EAGLE, kind=kind)
    with pytest.raises(ValueError, match=r"\['model'\]: .* is a draft head \(tensor 'fc\.weight', as an EAGLE"):
        start(draft)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("model.fc.weight", "model.embed_tokens.weight"), "'model.fc.weight', as an EAGLE or DFlash head"),
        (("midlayer.mlp.up_proj.weight", "embed_tokens.weight"), "an EAGLE-3 head"),
        (("d2t", "embed_tokens.weight"), "an EAGLE-3 head"),
        (("hidden_norm.weight", "embed_tokens.weight"), "DFlash"),
        (("medusa_head.0.0.linear.weight",), "Medusa heads"),
        (("0.0.linear.weight", "0.1.weight"), "Medusa heads"),
        (("speculator.emb.0.weight",), "an MLP speculator"),
        (("layers.0.mlp.up_proj.weight", "lm_head.weight"), "no token embedding among its tensors (layers.0.mlp"),
    ],
)
def test_other_heads(names: tuple[str, ...], why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a draft head") as error:
        start(checkpoint(tmp_path / "draft", *names))
    assert why in str(error.value)


@pytest.mark.parametrize("model", [TARGET, DRAFT])
def test_independent_models(model: str) -> None:
    names = tensor_names(model)
    assert names is not None
    assert "model.embed_tokens.weight" in names
    assert why_a_head(names) is None


@pytest.mark.parametrize(
    "names",
    [
        ("transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"),  # GPT-2
        ("model.decoder.embed_tokens.weight", "model.decoder.layers.0.fc1.weight"),  # OPT
        ("tok_embeddings.weight", "layers.0.attention.wq.weight", "output.weight"),  # Mistral's own files
        ("model.embed_tokens.weight", "model.layers.61.eh_proj.weight"),  # a whole model with MTP layers
        (),
    ],
)
def test_names_of_other_families(names: tuple[str, ...]) -> None:
    assert why_a_head(names) is None


def test_what_cannot_be_told_is_left_to_vllm(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    assert tensor_names(str(folder)) is None
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (folder / "pytorch_model.bin").write_text("no checkpoint either")
    assert tensor_names(str(folder)) is None
    assert tensor_names("nobody/has-this") is None  # nothing is cached, and the tests are offline


def test_a_cached_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--somebody--eagle"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots").mkdir()
    checkpoint(repo / "snapshots" / ("0" * 40), *EAGLE)
    names = tensor_names("somebody/eagle")
    assert names == set(EAGLE)
