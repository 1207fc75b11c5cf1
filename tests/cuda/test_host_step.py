"""Calls of functions in a whole step of the host, which have no noise, against those of the last run that was kept."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.gpu.host_step import CASES, NONE
from tests.documents import ROOT
from tests.engine.engines import V2

pytestmark = pytest.mark.skipif(
    V2 or "TESTED_VLLM" in os.environ, reason="in a process of its own, and the figures are of vLLM 0.32"
)

RESULTS = ROOT / "benchmarks" / "results" / "gpu" / "host_step.json"
SHORT = NONE, "opt_tree"


def counted(case: str) -> float:
    command = [sys.executable, "-m", "benchmarks.gpu.host_step", "--one", case, "1"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    calls: float = json.loads(found.stdout.splitlines()[-1])["function calls"]
    return calls


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in SHORT else pytest.mark.slow) for case in CASES]
)
def test_a_step_calls_as_few_functions_as_in_the_last_run(case: str) -> None:
    last = json.loads(RESULTS.read_text())["rows"][-1]["requests"]["1"]
    assert 0.9 * last[case]["function calls"] < counted(case) < 1.05 * last[case]["function calls"]
