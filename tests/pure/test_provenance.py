"""Each result under `benchmarks/results` says what it takes to repeat it, and a page cites it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT
from vllm_adaptive_tree.bench.provenance import provenance

RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(RESULTS.rglob("*.json"))
PAPERS = {"measured.json", "verdicts.json"}
"""Cited by `docs/papers.md` through the tables made of them."""

PARSE = """
import argparse, runpy, shlex, sys

class Parsed(BaseException):
    pass

def parse_args(*arguments):
    parse(*arguments)
    raise Parsed

parse, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, parse_args
for command in sys.argv[1:]:
    sys.argv, module = shlex.split(command), "vllm_adaptive_tree.cli.main"
    if sys.argv[:2] == ["python", "-m"]:
        module, *_ = sys.argv = sys.argv[2:]
    try:
        runpy.run_module(module, run_name="__main__")
    except Parsed:
        print(command)
"""
"""Parses commands, and prints those that may be run."""


def names(path: Path) -> str:
    return path.relative_to(RESULTS).as_posix()


@pytest.mark.parametrize("path", FILES, ids=names)
def test_provenance_of_a_result(path: Path) -> None:
    found: dict[str, Any] = json.loads(path.read_text())["provenance"]
    assert found.keys() - {"note"} == {"commit", "versions", "machine", "command"}
    assert all(found.values())
    git = ["git", "-C", str(ROOT), "cat-file", "-e"]
    if subprocess.run([*git, "HEAD"], capture_output=True).returncode == 0:
        assert subprocess.run([*git, found["commit"].rstrip("+")]).returncode == 0 or shallow()


def test_commands_of_results_can_be_typed() -> None:
    """All are parsed in one process, which imports vLLM once."""
    commands = {json.loads(path.read_text())["provenance"]["command"] for path in FILES}
    assert [command for command in commands if " /" in command] == [], "a path of one machine"
    answer = subprocess.run([sys.executable, "-c", PARSE, *commands], cwd=ROOT, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout.splitlines()) == (0, [*commands]), answer.stderr[-2000:]


def shallow() -> bool:
    """Return whether this is a checkout of the last commits alone, as CI's may be."""
    answer = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"], capture_output=True)
    return answer.stdout.strip() != b"false"


def test_every_result_is_cited() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *RESULTS.rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    assert [path.name for path in FILES if path.name not in PAPERS and path.name not in text] == []


def test_provenance_of_a_process(tmp_path: Path) -> None:
    found = provenance()
    assert found.keys() == {"commit", "versions", "machine", "command"}
    assert {"python", "torch", "vllm-adaptive-tree"} <= found["versions"].keys()
    assert found["machine"]["cores"] > 0
    script = "import pathlib, sys, vllm_adaptive_tree.bench.provenance as it; it.save(pathlib.Path(sys.argv[1]), [1])"
    (tmp_path / "measures.py").write_text(script)
    command = [sys.executable, "-m", "measures", "a b.json"]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    saved = json.loads((tmp_path / "a b.json").read_text())
    assert saved["rows"] == [1]
    assert saved["provenance"]["command"] == "python -m measures 'a b.json'"
