"""`vllm-adaptive-tree doctor`: what is installed; without a GPU what can be checked all the same."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.cli import self_test
from vllm_adaptive_tree.cli.doctor import NO_DEVICE
from vllm_adaptive_tree.cli.machine import findings
from vllm_adaptive_tree.cli.main import main
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.metrics.acceptance_record import folder
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers import METHODS
from vllm_adaptive_tree.version import __version__
from vllm_adaptive_tree.versions import window


def test_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--no-self-test"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["vllm-adaptive-tree"] == __version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["vLLM is supported"]
    assert found["ok"]
    assert [one["what"] for one in found["patches"] if one["now"]] == ["EngineArgs.create_engine_config"]
    ledger = (Path(__file__).parents[2] / "patches" / "README.md").read_text()
    assert all(f"`{one['what']}" in ledger for one in found["patches"])
    assert found["methods"] == sorted(METHODS)
    assert list(found["pairs"]) == sorted(METHODS)
    for method, rules in found["pairs"].items():
        asked = {"method": method, "model": "DRAFT", "num_speculative_tokens": 8}
        assert resolve(TreeOptions.parse(asked)[0]).rule_name == rules[0]
        for rule in RULES:
            options, _ = TreeOptions.parse({**asked, "rejection_sample_method": rule})
            with nullcontext() if rule in rules else pytest.raises(ValueError, match="would change the target"):
                resolve(options)
    assert main(["doctor", "--no-self-test"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "OK"
    assert f"supports vLLM {window()}, which is supported" in text
    assert "  EngineArgs.create_engine_config: vLLM has a closed list" in text
    assert "  SamplingParams._validate_spec_decode (for a tree method): " in text
    assert "  opt_tree: target_only" in text


def test_a_self_test(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--json"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    found = report["self-test"]
    assert report["ok"]
    assert "about twenty seconds" in said.err
    assert found["passed"]
    assert found["equal texts"] == found["texts"] == 4
    assert found["tokens per step"] > 1.3
    assert self_test.described(found).startswith("4 of 4 texts are equal with and without trees, ")
    monkeypatch.setattr(self_test, "LONGEST", 0.01)
    assert main(["doctor"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("NOT OK: self-test on the bundled pair: it has not ended within")


def test_acceptance_of_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert main(["doctor", "--no-self-test"]) == 0
    assert "acceptance of drafts: not known, no engine has left a record" in capsys.readouterr().out
    folder().mkdir(parents=True)
    one = {"target": "T", "draft": "D", "method": "opt_tree", "engine": 0, "time": "2026-01-02 03:04:05"}
    low = {**one, "steps": 512, "accepted": 3, "low": True, "causes": ["a head of another target? yes: it names 'U'"]}
    (folder() / "a.json").write_text(json.dumps(low))
    (folder() / "b.json").write_text(json.dumps({**low, "draft": "E", "accepted": 256, "low": False, "causes": []}))
    (folder() / "c.json").write_text("[]")
    (folder() / "d.json").write_text("{")
    assert main(["doctor", "--no-self-test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("acceptance of draft D for T"))
    assert lines[at : at + 3] == [
        "acceptance of draft D for T (opt_tree, engine 0, 2026-01-02 03:04:05): a node at depth 1 in 0.6 % of 512 "
        "drafted steps, TOO LOW, likely causes:",
        "  a head of another target? yes: it names 'U'",
        "acceptance of draft E for T (opt_tree, engine 0, 2026-01-02 03:04:05): a node at depth 1 in 50.0 % of 512 "
        "drafted steps, no alarm",
    ]


def test_another_vllm_is_not_ok(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_adaptive_tree.cli.doctor.is_supported", lambda _: False)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"NOT OK: install vLLM {window()}"


def test_what_is_slow() -> None:
    fast = {"avx512f", "amx_bf16"}
    quiet = {"cores": 32, "load": 1.0, "compiled": True, "preloaded": "/usr/lib/libtcmalloc_minimal.so.4"}
    assert findings(fast, **quiet) == []
    for flags, changed, said in (
        ({"avx2"}, {}, "no AVX-512"),
        ({"avx512f"}, {}, "bfloat16 in float32"),
        (fast, {"cores": 2}, "2 cores"),
        (fast, {"load": 20.0}, "20.0 processes run on 32 cores"),
        (fast, {"compiled": False}, "numba is missing"),
        (fast, {"preloaded": ""}, "tcmalloc"),
    ):
        (found,) = findings(flags, **{**quiet, **changed})
        assert said in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device(tmp_path: Path) -> None:
    """The kernels pass in the interpreter, which is no proof of a GPU: not 0."""
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "vllm_adaptive_tree", "doctor", "--gpu", "--out", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == NO_DEVICE, run.stdout + run.stderr
    assert "no CUDA device" in run.stderr
    report = json.loads(file.read_text())
    assert report["code"] == NO_DEVICE
    assert not report["ok"]
    assert "NOT OK: nothing has run on a GPU" in run.stdout
    (found,) = report["checks"].values()
    assert [one["check"] for one in found] == ["attention", "attention", "draws"]
    assert all(one["passed"] for one in found), found
    assert "attention passed" in run.stdout
