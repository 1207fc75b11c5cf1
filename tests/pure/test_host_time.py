"""The benchmark of the host's time on Model Runner V2 runs, and finds that prepared launches pass what Triton's own do.

Its times are no test: two of these tests share two processors.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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
    recorded = json.loads((ROOT / "benchmarks" / "results" / "gpu" / "host_time.json").read_text())["rows"][-1][
        "requests"
    ]
    assert {requests: set(figures) for requests, figures in found.items()} == {
        requests: set(figures) for requests, figures in recorded.items()
    }
    assert all(seconds > 0 for figures in found.values() for seconds in figures.values())
