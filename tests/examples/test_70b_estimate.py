"""Counts of `examples/70b/estimate.py`, against transformers' and vLLM's own modules, and by hand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from estimate import GIB, Plan, main
from gain import GPUS, OURS, PAPER, Acceptance, Gain, acceptances, reduced
from memory import CHUNK, Load
from model import Model, Shard

ROOT = Path(__file__).parents[2]
CONFIGS = {name: ROOT / "examples" / "70b" / "configs" / name for name in ("target", "draft")}
TARGET, DRAFT = (Model.read(folder) for folder in CONFIGS.values())
RANKS = 1, 8, 16  # 8: one K/V head each; 16: two ranks share one
SCALARS = 3 * 4 + 3 * 2  # bytes of a layer's scales and zero points of Q, K and V, in FP8


@pytest.fixture(scope="module")
def by_vllm() -> dict[str, dict[str, dict[str, int]]]:
    command = [sys.executable, "-m", "tests.examples.read_by_vllm", *map(str, CONFIGS.values()), *map(str, RANKS)]
    result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120)
    found = re.search("^RESULT(.*)$", result.stdout, re.MULTILINE)
    assert found is not None, result.stderr
    return json.loads(found[1])


@pytest.mark.parametrize(("name", "published"), [("target", 70_553_706_496), ("draft", 1_235_814_400)])
def test_parameters_are_those_of_transformers(name: str, published: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIGS[name]))
    assert Shard(Model.read(CONFIGS[name]), 1).parameters == model.num_parameters() == published


@pytest.mark.parametrize("ranks", RANKS)
def test_weights_and_kv_are_those_of_vllm(by_vllm: dict[str, Any], ranks: int) -> None:
    """Of one rank; K/V by vLLM's KVCacheSpec."""
    found = by_vllm[str(ranks)]
    for name, model in (("target", TARGET), ("draft", DRAFT)):
        shard = Shard(model, ranks)
        assert found[name] == {"layers": model.layers, "weights": shard.weights, "kv": shard.kv}
    fp8 = Shard(TARGET, ranks, fp8=True)
    assert found["fp8"]["weights"] == fp8.weights + TARGET.layers * SCALARS


def test_a_plan_by_hand() -> None:
    load = Load(requests=4, context=16_384, nodes=63, depth=10)
    plan = Plan(TARGET, DRAFT, 8, False, load, GPUS["h100"])
    assert plan.kv == 80 * 2 * 128 * 2 + 16 * 2 * 64 * 2  # one K/V head of each model
    assert plan.kv_of_all == 4 * (16_384 + 64) * plan.kv
    weights = plan.target.weights + plan.draft.weights
    assert plan.tokens == int((plan.utilization * 79 - 4) * GIB - weights) // plan.kv
    assert (1 - plan.utilization) * 79 * GIB >= plan.buffers.peak + GIB
    assert plan.buffers.kept > load.rows * plan.target.kv
    crowded = Plan(TARGET, DRAFT, 4, False, Load(64, 131_072, 63, 10), GPUS["h100"])
    assert crowded.tokens == 0


def test_buffers_grow_with_what_they_are_for() -> None:
    def peak(ranks: int = 8, **changes: int) -> int:
        load = Load(**{"requests": 4, "context": 16_384, "nodes": 63, "depth": 10, **changes})
        return Plan(TARGET, DRAFT, ranks, False, load, GPUS["h100"]).buffers.peak

    assert peak() < peak(4)
    assert peak() < peak(requests=8)
    assert peak() < peak(context=32_768)
    assert peak(nodes=10) < peak()
    assert peak(depth=5) < peak()


def test_vllm_works_on_no_more_logits_at_once() -> None:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

    assert get_max_chunk_logits(TARGET.vocabulary) == CHUNK // (4 * TARGET.vocabulary)


def test_a_gain_by_hand() -> None:
    """One request without a context to speak of: forwards read their weights, and what is moved is added."""
    load, gpu = Load(requests=1, context=1, nodes=4, depth=2), GPUS["h100"]
    target, draft = Shard(TARGET, 8), Shard(DRAFT, 8)
    found = Gain.of(gpu, target, draft, load, Acceptance("a pair", 3.0, 2.0))
    plain = (target.weights - 2 * target.embedding + target.kv) / gpu.bandwidth
    assert found.plain == pytest.approx(plain)
    drafting = 2 * draft.weights / gpu.bandwidth
    assert plain + drafting < found.step < plain + 1.2 * drafting
    assert found.ratio == pytest.approx(3 * found.plain / found.step)
    assert found.spare == pytest.approx(3 * found.plain - found.step)
    many = Gain.of(gpu, target, draft, Load(256, 1, 63, 10), Acceptance("a pair", 3.0, 2.0))
    assert many.step > 2 * target.read[0] * 256 * 64 / gpu.bf16  # operations
    assert reduced(target, draft, Acceptance("a pair", 3.0, 2.0)) == (160, 160 + 2 * 32)
    assert reduced(Shard(TARGET, 1), Shard(DRAFT, 1), Acceptance("a pair", 3.0, 2.0)) == (0, 0)


def test_many_requests_with_large_trees_lose() -> None:
    """As the README says, with any of the acceptances; with small trees they do not."""
    target, draft = Shard(TARGET, 8), Shard(DRAFT, 8)
    large, small = Load(16, 2048, 63, 10), Load(16, 2048, 10, 10)
    assert all(Gain.of(GPUS["h100"], target, draft, large, one).ratio < 1 for one in acceptances(large))
    assert all(Gain.of(GPUS["h100"], target, draft, small, one).ratio > 1 for one in acceptances(small))


def test_acceptance_is_what_the_papers_page_says() -> None:
    page = (ROOT / "benchmarks" / "results" / "papers" / "tables.md").read_text()
    for nodes, (tokens, forwards) in OURS.items():
        assert re.search(rf"^\| {nodes} \| {tokens:.2f} ± .* \| {forwards:.2f} ± ", page, re.MULTILINE)
    for pair, tokens in PAPER.items():
        assert re.search(rf"^\| {pair} \| .* \| {tokens:.2f} \|$", page, re.MULTILINE)


def test_no_gain_without_an_acceptance() -> None:
    def known(nodes: int, depth: int = 10) -> list[float]:
        return [one.tokens for one in acceptances(Load(4, 2048, nodes, depth))]

    assert known(63) == [3.25, 4.88, 7.74]
    assert known(50) == [3.25]
    assert known(24) == [2.57]
    assert known(4) == known(63, depth=9) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tensor-parallel 3", "64 attention heads cannot be cut for 3 ranks"),
        ("--tensor-parallel 0", "cannot be cut for 0 ranks"),
        ("--requests 0", "requests must be at least 1, got 0"),
        ("--requests 200", "lower --requests or --nodes"),
        ("--target nowhere", "give a folder with the config.json of a Llama"),
    ],
)
def test_errors_say_what_to_change(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in capsys.readouterr().err


def test_other_models_are_refused(tmp_path: Path) -> None:
    config = json.loads((CONFIGS["target"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_moe"}))
    with pytest.raises(ValueError, match="not a Llama without biases"):
        Model.read(tmp_path)
