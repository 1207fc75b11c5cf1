"""Host time of a step on Model Runner V2: prepared launches pass what Triton's own do, in a fraction of the time."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYER, BY_TRITON = "attention of a layer", "attention of a layer, launched by Triton"

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton"),
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="no vLLM"),
]


def test_prepared_launches():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.host_time", "--calls", "20"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout[run.stdout.index("{") :])["requests"]
    recorded = json.loads((ROOT / "benchmarks" / "results" / "gpu" / "host_time.json").read_text())[-1]["requests"]
    for requests, figures in found.items():
        assert figures[LAYER] < 0.5 * figures[BY_TRITON]
        ours = figures["step"] - figures["budget"], recorded[requests]["step"] - recorded[requests]["budget"]
        assert ours[0] * recorded[requests][BY_TRITON] < 2 * ours[1] * figures[BY_TRITON], "on a machine as fast"
