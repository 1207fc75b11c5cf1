"""Names and shapes of the tensors of a draft, in every format of files, and what they say."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.engines import DRAFT, TARGET
from vllm_adaptive_tree.engine.checkpoint import Shape, tensor_shapes
from vllm_adaptive_tree.engine.drafts.registry import by_tensors

EAGLE = {"fc.weight": (4, 8), "layers.0.mlp.up_proj.weight": (2, 4), "embed_tokens.weight": (3, 4)}


def checkpoint(folder: Path, shapes: dict[str, Shape], kind: str = "safetensors") -> str:
    """A folder that says it is the demo's draft, a Llama, and holds tensors of these shapes."""
    folder.mkdir()
    shutil.copy(Path(DRAFT) / "config.json", folder)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    parts = {f"model-{place}.safetensors": {name: tensors[name]} for place, name in enumerate(tensors)}
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    match kind:
        case "safetensors":
            save_file(tensors, folder / "model.safetensors")
        case "shards" | "listed shards":
            for file, part in parts.items():
                save_file(part, folder / file)
            if kind == "listed shards":
                save_file({"tok_embeddings.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
                (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        case "bin":
            torch.save(tensors, folder / "pytorch_model.bin")
            torch.save({"lr": 1}, folder / "training_args.bin")
        case _:  # an index alone
            (folder / kind).write_text(json.dumps(index))
    return str(folder)


@pytest.mark.parametrize("kind", ["safetensors", "shards", "listed shards", "bin"])
def test_shapes_are_read_from_every_format(kind: str, tmp_path: Path) -> None:
    assert tensor_shapes(checkpoint(tmp_path / "draft", EAGLE, kind)) == EAGLE


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_alone_gives_names(index: str, tmp_path: Path) -> None:
    assert tensor_shapes(checkpoint(tmp_path / "draft", EAGLE, index)) == dict.fromkeys(EAGLE)


@pytest.mark.parametrize("prefix", ["", "model.", "module."])
def test_prefixes_say_nothing(prefix: str, tmp_path: Path) -> None:
    draft = checkpoint(tmp_path / "draft", {prefix + name: shape for name, shape in EAGLE.items()})
    assert tensor_shapes(draft) == EAGLE


@pytest.mark.parametrize(
    ("shapes", "kind", "why"),
    [
        ({"fc.weight": (4, 8), "embed_tokens.weight": (3, 4)}, "eagle", "'fc.weight' of shape [4, 8]"),
        ({"fc.weight": None}, "eagle", "'fc.weight' of shape unknown"),
        ({"fc.weight": (4, 12)}, "eagle3", "[4, 12]"),
        ({"midlayer.mlp.up_proj.weight": None, "embed_tokens.weight": None}, "eagle3", "midlayer"),
        ({"layers.0.hidden_norm.weight": None, "fc.weight": None}, "eagle3", "layers.0.hidden_norm"),
        ({"d2t": None, "embed_tokens.weight": None}, "eagle3", "'d2t'"),
        ({"hidden_norm.weight": None, "d2t": None}, "dflash", "hidden_norm"),
        ({"markov_head.markov_w1.weight": None, "hidden_norm.weight": None}, "dspark", "markov"),
        ({"mask_hidden": None, "midlayer.mlp.up_proj.weight": None}, "peagle", "mask_hidden"),
        ({"medusa_head.0.0.linear.weight": None}, "medusa", "medusa_head"),
        ({"0.0.linear.weight": None, "0.1.weight": None}, "medusa", "'0.0.linear.weight'"),
        ({"speculator.emb.0.weight": None}, "mlp_speculator", "speculator.emb"),
        (
            {"layers.0.mlp.up_proj.weight": None, "lm_head.weight": None},
            None,
            "no token embedding among its tensors",
        ),
    ],
)
def test_heads(shapes: dict[str, Shape | None], kind: str | None, why: str) -> None:
    fact = by_tensors(shapes)
    assert fact is not None
    assert (fact.kind and fact.kind.name) == kind
    assert why in fact.why


@pytest.mark.parametrize("model", [TARGET, DRAFT])
def test_independent_models(model: str) -> None:
    shapes = tensor_shapes(model)
    assert shapes is not None
    config = json.loads((Path(model) / "config.json").read_text())
    assert shapes["embed_tokens.weight"] == (config["vocab_size"], config["hidden_size"])
    fact = by_tensors(shapes)
    assert fact is not None
    assert fact.kind is not None
    assert fact.kind.name == "model"


@pytest.mark.parametrize(
    "names",
    [
        ("transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight"),  # GPT-2
        ("model.decoder.embed_tokens.weight", "model.decoder.layers.0.fc1.weight"),  # OPT
        ("tok_embeddings.weight", "layers.0.attention.wq.weight", "output.weight"),  # Mistral's own files
        ("model.embed_tokens.weight", "model.layers.61.eh_proj.weight"),  # a whole model with MTP layers
    ],
)
def test_names_of_other_families(names: tuple[str, ...]) -> None:
    fact = by_tensors(dict.fromkeys(names))
    assert fact is not None
    assert fact.kind is not None
    assert fact.kind.name == "model"


def test_what_cannot_be_told_is_left_to_vllm(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    assert tensor_shapes(str(folder)) is None
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (folder / "pytorch_model.bin").write_text("no checkpoint either")
    assert tensor_shapes(str(folder)) is None
    assert tensor_shapes("nobody/has-this") is None  # nothing is cached, and the tests are offline


def test_a_cached_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--somebody--eagle"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots").mkdir()
    checkpoint(repo / "snapshots" / ("0" * 40), EAGLE)
    assert tensor_shapes("somebody/eagle") == EAGLE
