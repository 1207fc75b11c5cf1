"""`new-method` writes packages whose own tests pass."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vllm_adaptive_tree.cli.main import main
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.registry import REGISTRIES, register

KINDS = {"my_trees": [], "my_rule": ["--rule"], "my_draft": ["--draft"], "my_head": ["--head"]}


def test_what_is_written_passes_its_own_tests(tmp_path: Path) -> None:
    for name, kind in KINDS.items():
        assert main(["new-method", name, *kind, "--dir", str(tmp_path / "new")]) == 0
    files = {path.name for path in (tmp_path / "new" / "my_rule").iterdir()}
    assert files == {"pyproject.toml", "README.md", "my_rule.py", "test_my_rule.py"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path]
    tested = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout
    assert re.search(r"\b8 passed", tested.stdout)  # trees and two rules, two kinds, a draft, two checkpoints


def test_what_is_written_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "registered", {})
    for name, kind in KINDS.items():
        main(["new-method", name, *kind, "--dir", str(tmp_path)])
        monkeypatch.syspath_prepend(tmp_path / name)
        project = tomllib.loads((tmp_path / name / "pyproject.toml").read_text())["project"]
        [(group, points)] = project["entry-points"].items()
        register(name, points[name])
        [registry] = [registry for registry in REGISTRIES if name in registry.registered]
        assert registry.group == group
        [config] = re.findall(r"--speculative-config '(.*)'", (tmp_path / name / "README.md").read_text())
        options = TreeOptions.parse(json.loads(config))[0]
        assert name in (options.method, options.rejection_sample_method, options.draft)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("My-Method", [], "'My-Method' is no name for a module: give lower-case words joined by '_'"),
        ("class", [], "'class' is no name for a module"),
        ("opt_tree", [], "'opt_tree' is taken; choose another name for your proposer"),
        ("block", ["--rule"], "'block' is taken"),
        ("eagle3", ["--draft"], "'eagle3' is taken"),
        ("ngram", ["--head"], "'ngram' is taken; choose another name for your kind of draft"),
        ("json", [], "'json' is the name of an installed module"),
        ("there", [], "there exists already; choose another name, or another folder with --dir"),
    ],
)
def test_names_that_cannot_be_used(
    name: str, kind: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    assert main(["new-method", name, *kind, "--dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
