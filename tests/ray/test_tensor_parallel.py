"""One engine over two nodes of a Ray cluster, one tensor-parallel rank on each."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from tests.engine.engines import DRAFT, PROMPTS, TARGET, tree
from tests.engine.installations import with_version, without_package
from tests.ray.executors import ray_executor
from tests.ray.local_nodes import ENVIRONMENT, ROOT, Engine, Nodes

COUNT, LENGTH = 16, 40
START = 240
"""Seconds in which an engine has started, on a busy machine too."""
END = 60
"""In which a broken one has ended."""
EXAMPLE = ROOT / "examples" / "ray_tensor_parallel.py"
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Of the front end: one process less to start."""
ARGUMENTS = {
    "model": TARGET,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "block_size": 32,
    "disable_log_stats": False,
}
EXECUTORS = {  # and what each runs with
    "RayCPUExecutor": tree(12, budget="auto"),
    **({} if ray_executor is None else {"OldRayCPUExecutor": tree(12, threshold="auto")}),  # of vLLM 0.32
}


ELSEWHERE = {
    "lacking": (without_package, "ModuleNotFoundError: No module named 'vllm_adaptive_tree'"),
    "other": (
        lambda folder: with_version(folder, "9.8.7"),
        r"A tree method needs the same packages on every node, and on node \S+ \({address}, Ray node {name}\) "
        r"vllm-adaptive-tree is 9\.8\.7 \(source \w+\), not \S+ \(source \w+\) as on node \S+ \(127\.0\.0\.2, Ray node "
        r"{first}\), which configured the engine; install on the first node what the second has",
    ),
}


def params(**extra: Any) -> list[dict[str, Any]]:
    """Greedy, and every second request sampled with a seed."""
    common = {"max_tokens": LENGTH, "ignore_eos": True, **extra}
    return [{"temperature": 0.9, "seed": i, **common} if i % 2 else {"temperature": 0, **common} for i in range(COUNT)]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Answers of one rank without speculation."""
    engine = Engine(ARGUMENTS, **IN_PROCESS)
    try:
        engine.answer(START)
        engine.ask(prompts=PROMPTS[:COUNT], params=params(logprobs=2))
        answer = engine.answer(START)
        prompts = runpy.run_path(str(EXAMPLE))["PROMPTS"]
        engine.ask(prompts=prompts, params=[{"temperature": 0, "max_tokens": 64}] * len(prompts))
        said = zip(prompts, engine.answer(START)["text"], strict=True)
        return {**answer, "example": [prompt + text for prompt, text in said]}
    finally:
        engine.end()


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A cache folder of vLLM's for each node."""
    return [tmp_path_factory.mktemp("cache") for _ in range(2)]


@pytest.fixture(scope="module")
def nodes(caches: list[Path]) -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        nodes.add({"rank": 1, **dict.fromkeys(ELSEWHERE, 1)}, VLLM_CACHE_ROOT=str(caches[0]))
        nodes.add({"rank": 1}, VLLM_CACHE_ROOT=str(caches[1]))
        yield nodes
    finally:
        nodes.shutdown()


def start(nodes: Nodes, executor: str, **environment: str) -> Engine:
    arguments = {
        **ARGUMENTS,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": f"tests.ray.executors.{executor}",
        "worker_extension_cls": "tests.ray.probe.Probe",
        "speculative_config": {**EXECUTORS[executor], "draft_tensor_parallel_size": 2},
    }
    return Engine(arguments, RAY_ADDRESS=nodes.address, VLLM_HOST_IP="127.0.0.2", **environment)


@pytest.fixture(scope="module", params=EXECUTORS)
def engine(nodes: Nodes, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = start(nodes, request.param, VLLM_ADAPTIVE_TREE_OF_A_TEST="yes")
    try:
        assert engine.answer(START) == "ready"
        yield engine
    finally:
        engine.end()


def ask(engine: Engine, method: str, *args: Any) -> list[Any]:
    """Answer of each rank."""
    engine.ask(method=method, args=args)
    return engine.answer(END)


def test_each_rank_has_a_node_of_its_own(engine: Engine, nodes: Nodes) -> None:
    found = ask(engine, "installation")
    assert [one["node"].split("Ray node ")[1] for one in found] == [f"{name})" for name in nodes.names]
    assert ask(engine, "environment", "VLLM_ADAPTIVE_TREE_OF_A_TEST") == ["yes", "yes"]


def test_the_draft_is_sharded(engine: Engine) -> None:
    for heads, in_all in ask(engine, "heads"):
        assert 2 * heads == in_all


def test_costs_are_those_of_rank_0_and_kept_on_its_node(engine: Engine, caches: list[Path]) -> None:
    first, second = ask(engine, "costs")
    assert first == second
    if first is not None:  # with a budget
        (profile,) = (caches[0] / "adaptive_tree").iterdir()
        assert json.loads(profile.read_text())["costs"] == first
        assert not (caches[1] / "adaptive_tree").exists()


def test_tokens_are_those_of_one_rank_without_speculation(engine: Engine, plain: dict[str, Any]) -> None:
    engine.ask(prompts=PROMPTS[:COUNT], params=params())
    answer = engine.answer(START)
    drafted, accepted, nodes = (
        answer["metrics"][f"vllm:{name}"]
        for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "adaptive_tree_nodes")
    )
    same = [ours == theirs for ours, theirs in zip(answer["tokens"], plain["tokens"], strict=True)]
    print(f"{sum(same)} of {COUNT} identical, {accepted:.0f} of {drafted:.0f} nodes accepted")
    for index in (index for index in range(COUNT) if not same[index]):  # ranks add in another order: one tie may fall
        assert index % 2 == 0
        ours, theirs = answer["tokens"][index], plain["tokens"][index]
        at = next(i for i, token in enumerate(ours) if token != theirs[i])
        best, second = plain["best"][index][at]
        assert best - second < 1e-5, f"output {index} differs at token {at}: {ours} {theirs}"
    assert sum(same) >= COUNT - 1
    assert drafted >= nodes > accepted > 0  # a budget cuts trees that vLLM has counted, in steps that read prompts


def test_a_killed_rank_ends_the_engine(engine: Engine) -> None:
    """The last test of the engine."""
    other, killed = ask(engine, "process")
    engine.ask(prompts=PROMPTS[:COUNT], params=[{**one, "max_tokens": 480} for one in params()], steps=True)
    assert engine.answer(END) == "begun"
    os.kill(killed, signal.SIGKILL)
    text = engine.ended(END)
    assert re.search(r"rank=\[1\] died unexpectedly|ActorDiedError: (.|\n)*ip: 127\.0\.0\.3", text)
    assert "EngineDeadError" in text
    for _ in range(10 * END):
        if not Path(f"/proc/{other}").exists():
            return
        time.sleep(0.1)
    raise AssertionError("the other rank is still there")


@pytest.mark.parametrize(("what", "executor"), list(zip(ELSEWHERE, [*EXECUTORS] * 2, strict=False)))
def test_a_node_with_something_else_is_named(nodes: Nodes, tmp_path: Path, what: str, executor: str) -> None:
    make, message = ELSEWHERE[what]
    name = nodes.add({what: 1}, PYTHONPATH=f"{make(tmp_path / what)}:{ROOT}")
    address = f"127.0.0.{1 + len(nodes.names)}"
    engine = start(nodes, executor, TEST_RAY_RESOURCE=what, **IN_PROCESS)
    try:
        text = engine.ended(START)
    finally:
        engine.end()
    assert re.search(message.format(address=address, name=name, first=nodes.names[0]), text), text[-5000:]


def test_the_example(nodes: Nodes, plain: dict[str, Any]) -> None:
    """On CPUs, with the bundled pair."""
    engine = {name: value for name, value in ARGUMENTS.items() if name not in ("model", "disable_log_stats")}
    engine["distributed_executor_backend"] = "tests.ray.executors.RayCPUExecutor"
    process = subprocess.run(
        [sys.executable, str(EXAMPLE), TARGET, DRAFT, "--nodes=12", "--engine", json.dumps(engine)],
        env={**os.environ, **ENVIRONMENT, **IN_PROCESS, "RAY_ADDRESS": nodes.address, "VLLM_HOST_IP": "127.0.0.2"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    for text in plain["example"]:
        assert text in process.stdout
    for rank, name in enumerate(nodes.names[:2]):
        assert re.search(rf"rank {rank}: .*{name}", process.stdout)
    assert float(process.stdout.split("tokens per step: ")[1]) > 1
