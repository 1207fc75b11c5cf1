"""`vllm-adaptive-tree doctor`: what is installed; without a GPU what can be checked all the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_adaptive_tree.cli.doctor import NO_DEVICE
from vllm_adaptive_tree.cli.main import main
from vllm_adaptive_tree.proposers import METHODS
from vllm_adaptive_tree.version import __version__
from vllm_adaptive_tree.versions import window


def test_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["vllm-adaptive-tree"] == __version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["vLLM is supported"]
    assert found["patches"] == ["EngineArgs.create_engine_config"]
    assert found["methods"] == sorted(METHODS)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"supports vLLM {window()}, which is supported" in text
    assert "replaced in vLLM: EngineArgs.create_engine_config" in text


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
    (found,) = report["checks"].values()
    assert [one["check"] for one in found] == ["attention", "attention", "draws"]
    assert all(one["passed"] for one in found), found
    assert "attention passed" in run.stdout
