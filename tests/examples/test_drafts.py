"""One script for each kind of draft: they run, and say what the target says without them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("script", [["offline.py"], ["head.py"], ["look_up.py", "ngram"], ["merged.py"]])
def test_it_runs(script: list[str]) -> None:
    command = [sys.executable, str(EXAMPLES / script[0]), *script[1:]]
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split("\n", 1)[1]) > 50
