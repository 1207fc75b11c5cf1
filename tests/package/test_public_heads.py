"""Public heads of `docs/drafts.md`: each line against the facts of the config files, which are kept as data."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT
from vllm_adaptive_tree.cli.main import main
from vllm_adaptive_tree.cli.serve import with_target

HEADS = json.loads((ROOT / "tests" / "data" / "public_heads.json").read_text())
PAGE = (ROOT / "docs" / "drafts.md").read_text()


def folder(path: Path, config: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("one", HEADS, ids=lambda one: one["kind"])
def test_a_line_of_the_page(
    one: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kind, and what `serve` makes of the head alone where it names its target."""
    target, head = folder(tmp_path / "target", one["of_target"]), folder(tmp_path / "head", one["of_head"])
    config = {"method": "adaptive_tree", "num_speculative_tokens": 25, **({"tree": one["tree"]} if one["tree"] else {})}
    assert main(["check", json.dumps({**config, "model": head}), "--model", target, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["draft"]["kind"], found["notes"]) == (one["kind"], [])
    assert f"| `{one['target']}` |" in PAGE
    alone = with_target([head])
    if alone != [head]:
        assert alone[0] == one["target"]
        assert json.loads(alone[-1]) == {"model": head, **config}
        assert f"`{one['head']}` alone" in PAGE
    else:
        assert f"`{json.dumps({'method': config.pop('method'), 'model': one['head'], **config})}`" in PAGE
    sizes = [
        part.get("hidden_size")
        for part in (one["of_target"], one["of_head"].get("transformer_layer_config", one["of_head"]))
    ]
    assert sizes[0] == sizes[1]
    wider = folder(tmp_path / "wider", {**one["of_target"], "vocab_size": 1})
    assert main(["check", json.dumps({**config, "method": "adaptive_tree", "model": head}), "--model", wider]) == 2


def test_a_head_whose_target_is_a_folder_of_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"speculators_config": {"verifier": {"name_or_path": "/their/machine/TARGET"}}}
    head = folder(tmp_path / "head", config)
    with pytest.raises(ValueError, match="names its target '/their/machine/TARGET', which is not here"):
        with_target([head])
    assert main(["serve", head]) == 2
    assert capsys.readouterr().err.startswith("error: ")
