"""A configuration that reaches a node where something else is installed."""

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.engine import installations
from tests.engine.engines import TARGET, tree
from vllm_adaptive_tree.engine.installation import NODE, difference, here
from vllm_adaptive_tree.version import __version__

ROOT = Path(__file__).parents[2]
OURS = rf"{re.escape(__version__)} \(source [0-9a-f]{{8}}\)"
ELSEWHERE: dict[str, tuple[Callable[[Path], str], str]] = {
    "no package": (
        installations.without_package,
        rf"vllm-adaptive-tree is missing \(ModuleNotFoundError: No module named 'vllm_adaptive_tree'\), not {OURS} as",
    ),
    "another version": (
        lambda folder: installations.with_version(folder, "9.8.7"),
        rf"vllm-adaptive-tree is 9\.8\.7 \(source [0-9a-f]{{8}}\), not {OURS} as",
    ),
    "another source": (
        lambda folder: installations.with_version(folder, __version__),
        rf"vllm-adaptive-tree is {OURS}, not {OURS} as",
    ),
    "another vLLM": (lambda folder: installations.with_vllm(folder, "0.33.9"), r"vllm is 0\.33\.9, not [\d.]+ as"),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_configuration_is_refused(what: str, tmp_path: Path) -> None:
    arguments = EngineArgs(model=TARGET, dtype="float32", max_model_len=512, speculative_config=tree(12))
    (tmp_path / "config").write_bytes(pickle.dumps(arguments.create_engine_config()))
    make, message = ELSEWHERE[what]
    process = subprocess.run(
        [sys.executable, "-c", "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))", str(tmp_path / "config")],
        env={**os.environ, "PYTHONPATH": f"{make(tmp_path / 'node')}:{ROOT}", "VLLM_HOST_IP": "127.0.0.7"},
        capture_output=True,
        text=True,
    )
    error = process.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"RuntimeError: A tree method needs the same packages on every node, and on node \S+ \(127\.0\.0\.7\) "
        rf"{message} on node \S+ \(.*\), which configured the engine; install on the first node what the second has, "
        r"or remove the tree method from speculative_config",
        error,
    ), process.stderr[-3000:]


def test_what_differs_is_named() -> None:
    mine = here()
    assert difference(mine, mine) is None
    assert difference({**mine, NODE: "b"}, mine) is None
    assert difference({**mine, NODE: "b", "torch": "1.0"}, {**mine, "new": "2"}) == (
        f"on node b torch is 1.0, not {mine['torch']}, and new is missing, not 2"
    )
