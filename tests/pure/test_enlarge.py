"""A larger model that says the same."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_adaptive_tree.cli.main import main

TARGET = Path(__file__).parents[2] / "vllm_adaptive_tree" / "demo_pair" / "draft"


def test_it_says_the_same_and_costs_more(tmp_path, capsys):
    assert main(["enlarge", str(TARGET), str(tmp_path / "large"), "--to", "3M"]) == 0
    small, large = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for model in (TARGET, tmp_path / "large")
    )
    assert 2.9e6 < large.num_parameters() < 3.1e6
    assert f"{large.num_parameters():,}" in capsys.readouterr().out
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
    ],
)
def test_what_cannot_be_enlarged(model, out, to, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps({}))
    assert main(["enlarge", str(model), str(out), "--to", to]) == 1
    assert message in capsys.readouterr().err


def test_a_size_that_is_none(capsys):
    with pytest.raises(SystemExit):
        main(["enlarge", "a", "b", "--to", "big"])
    assert "'big' is no number of parameters" in capsys.readouterr().err
