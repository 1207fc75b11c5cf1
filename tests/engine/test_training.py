"""`train-gate` and `calibrate` on the bundled pair, short: interrupted, killed, resumed, and with bad input."""

import json
import math
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from tests.engine.engines import DRAFT, PROMPTS, TARGET, Engines, assert_identical, generate, runner_of, tree
from vllm_adaptive_tree.cli.main import main
from vllm_adaptive_tree.engine import translate
from vllm_adaptive_tree.engine.cpu_worker import TreeWorker
from vllm_adaptive_tree.engine.startup.finish import tree_options
from vllm_adaptive_tree.engine.targets import checks
from vllm_adaptive_tree.gates import training
from vllm_adaptive_tree.gates.examples import EXAMPLE_BUILDERS, Verified
from vllm_adaptive_tree.gates.parts import Parts
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers.gate import Gate

USED = [prompt.strip("\n") for prompt in PROMPTS[:4]]
LENGTH = 24
KILLED = """
import os, signal
from vllm_adaptive_tree.cli import collecting, main

def next_file(parts, own=collecting.Parts.next_file):
    if len(parts.files) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return own(parts)

collecting.SAVE_EVERY, collecting.Parts.next_file = -1.0, next_file
main.main({})
"""
"""Saves after every step, and dies as it wants to for the sixth time."""


def command(folder: Path, *arguments: str) -> list[str]:
    (folder / "prompts.txt").write_text("\n---\n".join(USED))
    shared = ["--prompts", str(folder / "prompts.txt"), "--max-tokens", str(LENGTH), "--dtype", "float32"]
    return [*arguments, "--out", str(folder / "out"), *shared]


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, "logprobs": 2, **changes})


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    """Outputs of vLLM without speculation."""
    outputs = generate(engines.start(), USED, greedy())
    engines.shutdown()
    return outputs


@pytest.mark.slow
def test_an_interrupted_c2t_run_goes_on(
    tmp_path: Path, plain: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(tmp_path, "train-gate", "c2t", "--nodes", "40")
    said: dict[str, list[int]] = defaultdict(list)
    original, steps = LLMEngine.step, 0

    def step(engine: LLMEngine) -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise KeyboardInterrupt
        outputs = original(engine)
        for output in outputs:
            said[output.request_id] += output.outputs[0].token_ids
        return outputs

    monkeypatch.setattr(LLMEngine, "step", step)
    assert main(arguments) == 130
    assert "the same command goes on there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    parts = Parts(tmp_path / "out.parts")
    assert parts.progress() == said
    assert all(0 < len(tokens) < LENGTH for tokens in said.values())
    before = parts.load()

    assert main(arguments) == 0
    assert [said[str(number)] for number in range(len(USED))] == [list(output.token_ids) for output in plain]
    assert parts.progress() == {str(number): None for number in range(len(USED))}
    collected = parts.load()
    assert collected.trees > before.trees > 0
    label = collected.columns["label"]
    assert len(label) == 40 * collected.trees, "whole trees"
    emitted = len(USED) * (LENGTH - 3)  # less those of both prefills, and a last one for which nothing is drafted
    assert emitted <= label.sum() + collected.trees <= emitted + 10 * len(USED), "the last path may have been cut"
    gate = Gate.load(tmp_path / "out", inputs=3)
    shown = capsys.readouterr().out
    assert f"{collected.trees} trees, {len(label):,} examples, {label.sum():.0f} of them positive" in shown
    assert gate.features == "log"
    assert all(word in shown for word in ("recall", "positive rate", "beta", "<- taken", "of 48 units alive"))
    assert all(f"seed {seed}: held-out loss 0." in shown for seed in range(3))
    assert "a constant: held-out loss 0.6365" in shown

    steps = -1000
    assert main(arguments) == 0, "nothing is left to collect"
    assert steps == -1000
    assert main([*arguments, "--nodes", "9"]) == 2
    assert "holds the examples of another run (num_speculative_tokens: 40 there, 9 now)" in capsys.readouterr().err
    tuned = [*command(tmp_path / "out.parts", *arguments[:4]), "--from", str(tmp_path / "out")]
    tuned[tuned.index("--out") + 1] = str(tmp_path / "tuned")
    assert main([*tuned, "--features", "paper"]) == 2
    assert "reads 'log' features, and goes on with them" in capsys.readouterr().err
    assert main(tuned) == 0
    assert "before: held-out loss 0." in capsys.readouterr().out
    assert Parts(tmp_path / "tuned.parts").load().columns["prompt"].unique().tolist() == [0, 1], "two of four prompts"
    difference = sum(
        (a - b).abs().sum()
        for a, b in zip(gate.parameters(), Gate.load(tmp_path / "tuned", 3).parameters(), strict=True)
    )
    assert difference > 0


def test_a_killed_run_of_type_1_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = command(tmp_path, "train-gate", "mcsd", "--type", "type1", "--temperature", "0", "1")
    out, parts = tmp_path / "out", Parts(tmp_path / "out.parts")
    script = KILLED.format([*arguments, "--batch", "1"])
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    assert not out.exists()
    before = parts.load()
    assert before.trees > 1
    first, second = [features for file in parts.files if len(features := load_file(file)["features"])][:2]
    assert not second[: len(first)].equal(first), "every tree stands in one part"
    unfinished = [number for number, tokens in parts.progress().items() if tokens is not None]
    assert unfinished

    seen: list[Verified] = []
    monkeypatch.setattr(training, "MAX_LOSS_RATIO", math.inf)  # so few examples teach a model of this size nothing
    monkeypatch.setitem(
        EXAMPLE_BUILDERS, "mcsd-type1", lambda one, own=EXAMPLE_BUILDERS["mcsd-type1"]: (seen.append(one), own(one))[1]
    )
    assert main(arguments) == 0
    assert parts.load().trees == before.trees + len(seen)
    assert Gate.load(out, inputs=128).inputs == 128
    assert parts.load().columns["label"].max() <= 1

    embedding = load_file(f"{DRAFT}/model.safetensors")["model.embed_tokens.weight"].float()
    for one in seen:
        assert one.hidden is not None
        torch.testing.assert_close(one.hidden @ embedding.T, one.draft, atol=1e-3, rtol=1e-3)
    paths = [one for one in seen if one.temperature == 0 and one.accepted.any()]
    for one in paths:  # what was accepted is what the target says
        for node in one.accepted.nonzero()[:, 0].tolist():
            assert one.target[1 + one.parent[node]].argmax() == one.tokens[node]
    assert paths
    assert {one.temperature for one in seen} == {0.0, 1.0}


@pytest.mark.parametrize(("rule", "children"), [("rrsw", 6), ("spechub", 2)])
def test_sequoia_s_vector_counts_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, children: int
) -> None:
    """Against the two models in Hugging Face: the place of the target's best token among the draft's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wide = [] if rule == "spechub" else ["--children", str(children)]
    assert main(command(tmp_path, "calibrate", "sequoia", "--rule", rule, *wide)) == 0
    found = json.loads((tmp_path / "out").read_text())
    target, draft = (AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32) for x in (TARGET, DRAFT))
    ranks = []
    for prompt in USED:
        tokens = AutoTokenizer.from_pretrained(TARGET).encode(prompt)
        end = len(tokens) + LENGTH
        with torch.no_grad():
            while len(tokens) < end:
                tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
            best = draft(torch.tensor([tokens])).logits[0].topk(children).indices.tolist()
        root = end - LENGTH  # the prefill's token
        while root < end - 2:  # nothing is drafted for the last token
            rank = best[root].index(tokens[root + 1]) if tokens[root + 1] in best[root] else -1
            ranks.append(rank)
            root += 1 if rank < 0 else 2
    assert found["positions"] == len(ranks)
    assert found["vector"] == pytest.approx([ranks.count(child) / len(ranks) for child in range(children)], abs=1e-5)
    assert (found["method"], found["temperatures"], found["rejection_sample_method"]) == ("static_tree", [0.0], rule)
    assert f"child {children:2}: " in capsys.readouterr().out
    spec = {**tree(20, vector=str(tmp_path / "out")), "method": "sequoia", "rejection_sample_method": rule}
    assert (
        resolve(tree_options(config_of(spec))).proposer.shape
        != resolve(tree_options(config_of({**spec, "tree": {}, "rejection_sample_method": "rrsw"}))).proposer.shape
    )


def test_a_hub_has_two_children(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, "calibrate", "sequoia", "--rule", "spechub", "--children", "3")) == 2
    assert "give --children 2" in capsys.readouterr().err


def config_of(spec: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=TARGET, speculative_config=spec, max_model_len=512).create_engine_config()


@pytest.mark.parametrize(("method", "options"), [("c2t", {}), ("mcsd", {"stop": "type1", "shape": [2, 1, 1, 1]})])
def test_the_bundled_gates_decide(
    engines: Engines, plain: list[Any], monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any]
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(translate.logger, "warning", lambda text, *values: warnings.append(text % values))
    llm = engines.start({**tree(20, **options), "method": method})
    assert [("docs/training.md" in text, method in text) for text in warnings] == [(True, True)]
    sizes = set()
    runner = runner_of(llm)
    monkeypatch.setattr(
        runner,
        "_sample",
        lambda *a, own=runner._sample: (sizes.update(map(len, runner.step.verification.trees.values())), own(*a))[1],
    )
    assert_identical(plain, generate(llm, USED, greedy()))
    assert len(sizes - {0}) > 1, "the gate decides nothing"


def test_type_1_is_refused_beside_another_draft(engines: Engines) -> None:
    proposer = resolve(tree_options(config_of({**tree(20, stop="type1"), "method": "mcsd"}))).proposer
    checks.check_hidden_size(proposer, 128)
    with pytest.raises(
        ValueError, match=r"reads hidden states of 128, the draft's have 64; train one .*train-gate mcsd"
    ):
        checks.check_hidden_size(proposer, 64)


def test_type_1_has_no_examples_of_a_text() -> None:
    worker = SimpleNamespace(use_v2_model_runner=False, rank=0, vllm_config=config_of({**tree(20), "model": "ngram"}))
    with pytest.raises(
        ValueError, match="type1 reads the draft's hidden states, and 'ngram' has none; use --type type2"
    ):
        TreeWorker.record(worker, "mcsd-type1", {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", f"{DRAFT}/model.safetensors"], "does not hold a gate of 3 features"),
        (["--draft", "/no/such/draft"], "'/no/such/draft' is no folder here"),
        (["--model", "/no/such/target"], "'/no/such/target' is no folder here"),
        (["--from", "/no/such/gate"], "cannot read '/no/such/gate'"),
        (["--prompts", "/no/such/file"], "No such file"),
        (["--out", "/no/such/folder/out"], "the folder of /no/such/folder/out does not exist"),
        (["--nodes", "0"], "is not a positive number"),
        (["--temperature", "hot"], "'hot' is no temperature"),
        (["--temperature", "-1"], "'-1' is no temperature"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command(tmp_path, "train-gate", "c2t"), *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "1024"], "--max-tokens 1024 leaves no room"),
        (["--draft", "no/draft"], "'no/draft' is no folder here and not in the hub's cache"),
        (["--draft", "no/draft", "--nodes", "9"], "'no/draft' is no folder here and not in the hub's cache"),
        (["--model", "no/target"], "'no/target' is no folder here and not in the hub's cache"),
    ],
)
def test_what_cannot_work_is_said(
    tmp_path_factory: pytest.TempPathFactory, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "refused"
    folder.mkdir(exist_ok=True)
    assert main([*command(folder, "train-gate", "c2t"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert os.listdir(folder) != ["out"]
