"""The benchmark of the host's time on Model Runner V2 runs, and finds that prepared launches pass what Triton's own do.

Its times are no test: two of these tests share two processors. The calls of functions in a step are bounded by the last
run that is recorded: who adds some records another run.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu" / "host_time.json"

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton"),
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="no vLLM"),
]


def test_prepared_launches():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.host_time", "--calls", "20"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout[run.stdout.index("{") :])
    recorded = json.loads(RESULTS.read_text())["rows"][-1]
    for kind in ("requests", "function calls"):
        assert {requests: set(figures) for requests, figures in found[kind].items()} == {
            requests: set(figures) for requests, figures in recorded[kind].items()
        }
    assert all(seconds > 0 for figures in found["requests"].values() for seconds in figures.values())
    for requests, figures in found["function calls"].items():
        for part, calls in figures.items():
            assert calls <= 1.02 * recorded["function calls"][requests][part], (requests, part)
