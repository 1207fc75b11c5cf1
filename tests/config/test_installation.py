"""A configuration that reaches a node where something else is installed."""

import os
import pickle
import pickletools
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


MISSING = "ModuleNotFoundError: No module named 'vllm_adaptive_tree'"
"""On a node without the package, where nothing of ours can run."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a pickled configuration."""
    arguments = EngineArgs(model=TARGET, dtype="float32", max_model_len=512, speculative_config=tree(12))
    file = tmp_path_factory.mktemp("pickled") / "config"
    file.write_bytes(pickle.dumps(arguments.create_engine_config()))
    return file


def unpickled(config: Path, node: str) -> str:
    """The last line of the error on another node. `node`: a folder of `installations`."""
    process = subprocess.run(
        [sys.executable, "-c", "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))", str(config)],
        env={**os.environ, "PYTHONPATH": f"{node}:{ROOT}", "VLLM_HOST_IP": "127.0.0.7"},
        capture_output=True,
        text=True,
    )
    return process.stderr.splitlines()[-1]


def test_a_node_without_the_package(config: Path, tmp_path: Path) -> None:
    assert unpickled(config, installations.without_package(tmp_path)) == MISSING


def test_nothing_of_the_mark_is_code(config: Path) -> None:
    """The pickle names a function of this package, and has versions as its argument."""
    opcodes = list(pickletools.genops(config.read_bytes()))
    strings = {value for _, value, _ in opcodes if isinstance(value, str)}
    assert {"vllm_adaptive_tree.engine.mark", "arrive"} <= strings
    assert not strings & {"builtins", "eval", "exec"}
    assert max(map(len, strings)) < 1000


@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_configuration_is_refused(config: Path, what: str, tmp_path: Path) -> None:
    make, message = ELSEWHERE[what]
    error = unpickled(config, make(tmp_path / "node"))
    assert re.fullmatch(
        r"RuntimeError: A tree method needs the same packages on every node, and on node \S+ \(127\.0\.0\.7\) "
        rf"{message} on node \S+ \(.*\), which configured the engine; install on the first node what the second has, "
        r"or remove the tree method from speculative_config",
        error,
    ), error


def test_what_differs_is_named() -> None:
    mine = here()
    assert difference(mine, mine) is None
    assert difference({**mine, NODE: "b"}, mine) is None
    assert difference({**mine, NODE: "b", "torch": "1.0"}, {**mine, "new": "2"}) == (
        f"on node b torch is 1.0, not {mine['torch']}, and new is missing, not 2"
    )
