import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_adaptive_tree.cli import demo
from vllm_adaptive_tree.cli.comparison import Comparison, Method
from vllm_adaptive_tree.cli.generation import About, Difference, Generation, Turn, flat
from vllm_adaptive_tree.cli.stepping import Engine, Job, first_difference


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(arguments)


def turn(*requests: list[list[int]], drafts: int, nodes: int, accepted: int, seconds: float = 1.0) -> Turn:
    counters = {"drafts": drafts, "draft_tokens": nodes, "accepted_tokens": accepted}
    return Turn(list(requests), seconds, seconds, counters)


def generation(*rounds: list[Turn], threads: int = 1) -> Generation:
    return Generation(list(rounds), [], [], About("0", "bfloat16", threads, True), [])


def test_the_bundled_target_is_enlarged() -> None:
    assert demo.target_size(options()) == 500_000_000
    assert demo.target_size(options("--enlarge-to", "none")) == 0
    assert demo.target_size(options("--enlarge-to", "20M")) == 20_000_000
    assert demo.target_size(options("--model", "/mine")) == 0
    assert demo.target_size(options("--model", "/mine", "--enlarge-to", "2B")) == 2_000_000_000


def test_one_thread_for_a_tiny_target_only() -> None:
    bundled = options().model
    assert demo.environment(bundled, enlarged=False)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in demo.environment(bundled, enlarged=True)
    assert {"OMP_NUM_THREADS", "HF_HUB_OFFLINE"}.isdisjoint(demo.environment("theirs/model", enlarged=False))


def test_loads() -> None:
    assert [(load.batch, load.rounds) for load in demo.loads(8)] == [(1, 1), (8, demo.ROUNDS)]
    assert [load.batch for load in demo.loads(1)] == [1]


def test_generation() -> None:
    """Two rounds of two requests, one at a time; in the second step of the last request nothing was drafted."""
    first = turn([[1], [2, 3], [4]], drafts=2, nodes=8, accepted=2, seconds=2.0)  # of the last step a token was cut
    second = turn([[1], [2], [3, 4]], drafts=1, nodes=4, accepted=1, seconds=4.0)
    found = generation([first, second], [first, second._replace(seconds=8.0)], threads=2)
    found.check_counters(nodes=4)
    assert found.tokens == [[[1, 2, 3, 4]] * 2] * 2
    assert found.seconds == [6.0, 10.0]
    assert found.tokens_per_second == 8 / 8.0
    assert found.core_share == (6 + 6) / 16 / 2
    assert found.tokens_per_step == 1 + 6 / 8
    assert found.nodes_per_step == 24 / 8


def test_texts_that_differ() -> None:
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    plain, other = (generation([turn([[1], [2]], drafts=0, nodes=0, accepted=0)]) for _ in range(2))
    compared = [Method("plain", None), Method("tree", None)]
    found = Comparison(0, compared, demo.loads(1), ["prompt"], [[plain, other]])
    assert [row.identical for row in found.rows([plain, other])] == [True, True]
    assert not list(found.differences())
    other.differences.append(Difference(4, 0.5, near_tie=False))
    assert [row.identical for row in found.rows([plain, other])] == [True, False]
    assert found.ties(found.loads[0]) is None
    other.differences.append(Difference(7, 0.0, near_tie=True))
    assert "ties: tree at prompt 8." in (found.ties(found.loads[0]) or "")
    assert [(item.method, item.near_tie) for item in found.differences()] == [("tree", False), ("tree", True)]


@pytest.mark.parametrize(("drafts", "accepted"), [(3, 1), (2, 0), (2, 6)])
def test_counters_that_contradict_the_tokens(drafts: int, accepted: int) -> None:
    found = generation([turn([[1], [2, 3], [4]], drafts=drafts, nodes=8, accepted=accepted)])
    with pytest.raises(RuntimeError, match="vLLM counted"):
        found.check_counters(nodes=4)


def test_a_target_that_cannot_be_enlarged(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in demo.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert demo.run(options("--enlarge-to", "1M")) == 2
    assert "cannot be enlarged to 1,000,000" in capsys.readouterr().err


def test_what_the_target_says_of_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in demo.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with Engine(Job("plain", options().model, None, "float32", batch=1)) as engine:
        found = engine.decode(["import os"], 6)
        tokens = flat(found.requests[0])
        assert engine.generation([[found]], ["import os"], [tokens]).differences == []
        wrong = [*tokens[:3], tokens[3] ^ 1, *tokens[4:]]
        (difference,) = engine.generation([[found]], ["import os"], [wrong]).differences
        assert not difference.near_tie
        assert difference.margin > 0.01


def test_demo(tmp_path: Path) -> None:
    prompts, file = tmp_path / "prompts", tmp_path / "figures.json"
    prompts.write_text("import os\ndef main(\n")
    command = ["demo", "--enlarge-to", "8M", "--max-tokens", "8", "--prompts", str(prompts), "--json", str(file)]
    module = [sys.executable, "-m", "vllm_adaptive_tree.cli.main"]
    done = subprocess.run([*module, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "one request at a time" in done.stdout
    assert "2 requests at a time" in done.stdout
    assert "enlarged to 7,999,744 parameters" in done.stdout
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures["settings"]["enlarged_to"] == 7_999_744
    for load in figures["loads"]:
        assert [row["identical"] for row in load["methods"]] == [True] * 3
        assert load["methods"][1]["counters"]["accepted_tokens"] > 0
