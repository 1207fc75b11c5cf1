"""A larger model that says the same."""

import json
import shutil
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from vllm_adaptive_tree.bench.models import enlarge
from vllm_adaptive_tree.cli.arguments import parameters

TARGET = Path(__file__).parents[2] / "vllm_adaptive_tree" / "demo_pair" / "draft"


def test_it_says_the_same_and_costs_more(tmp_path):
    count = enlarge(TARGET, tmp_path / "large", parameters("3M"))
    small, large = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for model in (TARGET, tmp_path / "large")
    )
    assert 2.9e6 < large.num_parameters() < 3.1e6
    assert large.num_parameters() == count
    assert large.config.intermediate_size % 64 == 0
    tokens = torch.arange(60).view(3, 20) * 31
    with torch.no_grad():
        torch.testing.assert_close(large(tokens).logits, small(tokens).logits)
    added = large.model.layers[0].mlp
    assert added.gate_proj.weight[-1].abs().max() > 0, "the new units do real work"
    for file in TARGET.iterdir():
        assert (tmp_path / "large" / file.name).exists()


@pytest.mark.parametrize(
    ("model", "out", "to", "message"),
    [
        (TARGET, "x", "1000", "it cannot be enlarged to 1,000"),
        (TARGET, TARGET, "3M", "is the model itself"),
        ("none", "x", "3M", "none"),
        ("empty", "x", "3M", "no MLP of gate, up and down projections"),
        ("other", "x", "3M", "no MLP of gate, up and down projections"),
        ("damaged", "x", "3M", "model.safetensors is damaged: "),
    ],
)
def test_what_cannot_be_enlarged(model, out, to, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps({}))
    for name in ("other", "damaged"):
        shutil.copytree(tmp_path / "empty", tmp_path / name)
    save_file({"scale": torch.ones(1)}, tmp_path / "other" / "model.safetensors")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises((ValueError, OSError), match=message):
        enlarge(Path(model), Path(out), parameters(to))


def test_a_size_that_is_none():
    with pytest.raises(ArgumentTypeError, match="'big' is no number of parameters"):
        parameters("big")
