"""Missing parts of a node of a Ray cluster, by its report; in `tests/ray/test_nodes.py` a real node reports."""

from importlib.metadata import entry_points
from typing import Any

import pytest

from examples.ray_nodes import lack_of, probe

GOOD = {"package": "1.2", "vllm": "0.32.0", "plugin": ["adaptive_tree"], "allowed": None}


@pytest.mark.parametrize(
    ("changes", "lack"),
    [
        ({}, None),
        ({"allowed": "another,adaptive_tree"}, None),
        ({"package": None}, "vllm-adaptive-tree is not installed"),
        ({"plugin": []}, "vllm-adaptive-tree is not installed"),
        ({"package": "1.1"}, "vllm-adaptive-tree is 1.1, and 1.2 where this is asked"),
        ({"allowed": ""}, "VLLM_PLUGINS='' leaves out 'adaptive_tree'"),
        ({"allowed": "adaptive"}, "VLLM_PLUGINS='adaptive' leaves out 'adaptive_tree'"),
        ({"vllm": None}, "vLLM is not installed"),
        ({"vllm": "0.29.0"}, "vLLM is 0.29.0, and 0.32 and 0.33 are supported"),
        ({"vllm": "0.33.0"}, "vLLM is 0.33.0, and 0.32.0 on another node"),
    ],
)
def test_what_a_node_lacks(changes: dict[str, Any], lack: str | None) -> None:
    assert lack_of(GOOD | changes, "1.2", "0.32.0") == lack


def test_this_process_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    found = probe()()
    assert found["plugin"] == [one.name for one in entry_points(group="vllm.general_plugins", name="adaptive_tree")]
    assert lack_of(found, found["package"], found["vllm"]) is None
