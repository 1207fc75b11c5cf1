"""One script for each kind of draft: they run, and say what the target says without them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.heads import dspark

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = [["offline.py"], ["head.py"], ["one_forward.py", "HEAD"], ["look_up.py", "ngram"], ["merged.py"]]


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_runs(script: list[str], tmp_path: Path) -> None:
    arguments = [dspark(tmp_path / "head") if one == "HEAD" else one for one in script[1:]]
    command = [sys.executable, str(EXAMPLES / script[0]), *arguments]
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split("\n", 1)[1]) > 50
