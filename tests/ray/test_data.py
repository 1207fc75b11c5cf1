"""Ray Data on two nodes: `examples/ray_data.py`, and the same job with an engine killed in the middle."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ray.starting import EXAMPLES, engine_cores, environment, wait_for


def test_the_example(texts: dict[str, str], tmp_path: Path) -> None:
    """Two replicas on two nodes, a tree on either, and every row is the target's own."""
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, str(EXAMPLES / "ray_data.py"), str(file)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    print(ended.stdout)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["prompt"]: row["generated_text"] for row in rows} == texts
    assert len(rows) == len(texts)
    assert re.search(rf"^{len(texts)} rows in \d+ s", ended.stdout, re.MULTILINE)
    said = re.findall(r"^(\S+): ([\d.]+) tokens per step, (\d+) steps$", ended.stdout, re.MULTILINE)
    assert {node for node, _, _ in said} == {"node-1", "node-2"}
    assert all(float(tokens) > 1.5 for _, tokens, _ in said)
    emitted = sum(float(tokens) * int(steps) for _, tokens, steps in said)
    # A row's first token is its prompt's; its last step may be cut. An engine reports its figures every second, and the
    # last ones end with it: a third of a run as short as this one.
    assert 0.4 < emitted / (47 * len(rows)) < 1.2
    shown = ended.stdout.split("\n---\n")[:2]
    assert all(text in {prompt + texts[prompt] for prompt in texts} for text in shown)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    import ray
    from local_cluster import two_nodes

    with two_nodes() as address:
        ray.init(address, log_to_driver=False)
        yield address


class Killed(NamedTuple):
    at: float
    noticed: float  # when the replica had ended, which it does where a row of its own has failed


def kill_an_engine() -> Killed:
    """As soon as replicas on both nodes have generated: one killed while it starts would end the job."""
    from ray_metrics import endpoints, totals

    def serving() -> bool:
        return all(totals(url)["generation_tokens"] for url in endpoints().values())

    wait_for(serving, 300, "tokens of both replicas")
    engine = engine_cores(os.getpid())[0]
    replica = engine.parent()
    assert replica is not None
    at = time.monotonic()
    engine.kill()
    replica.wait(60)
    return Killed(at, time.monotonic())


def test_a_killed_engine_loses_no_row(cluster: str, texts: dict[str, str]) -> None:
    """Ray Data does the batches of a lost replica again: no row is missing, none comes twice, none is another."""
    import ray
    import ray_data

    ray.data.DataContext.get_current().wait_for_min_actors_s = 600
    prompts = list(texts)
    rows = [{"id": number, "prompt": prompts[number % len(prompts)]} for number in range(8 * len(prompts))]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows) // 8)
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_an_engine)
        found = ray_data.processor()(dataset).take_all()
        end = time.monotonic()
        killed = killing.result()
    print(f"killed {end - killed.at:.1f} s and lost {end - killed.noticed:.1f} s before the end of the job")
    assert killed.noticed < end
    assert Counter(row["id"] for row in found) == Counter(range(len(rows)))
    assert [row for row in found if row["prompt"] != rows[row["id"]]["prompt"]] == []
    assert [row for row in found if row["generated_text"] != texts[row["prompt"]]] == []


class FrontEnd:
    """A replica of Ray Serve on GPUs, as far as it differs from one on CPUs: its configuration is built in a task
    elsewhere, and arrives finished. No plugin is loaded here."""

    def __init__(self, model: str, engine: dict[str, Any]):
        import ray
        import vllm.plugins
        from ray.llm._internal.serve.engines.vllm.vllm_engine import _get_vllm_engine_config
        from ray.serve.llm import LLMConfig
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor.abstract import Executor
        from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

        config = LLMConfig(
            model_loading_config={"model_id": "demo", "model_source": model},
            engine_kwargs=engine,
            placement_group_config={"bundle_per_worker": {"CPU": 1}},
        )
        build = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(_get_vllm_engine_config)
        environment = {"env_vars": {"VLLM_PLUGINS": "adaptive_tree"}}
        _, finished = ray.get(build.options(runtime_env=environment).remote(config))
        assert not vllm.plugins.plugins_loaded
        self.engine = AsyncLLM(
            vllm_config=finished,
            executor_class=Executor.get_class(finished),
            log_stats=True,
            stat_loggers=[RayPrometheusStatLogger],
        )

    async def generate(self, prompts: list[str]) -> dict[str, str]:
        from vllm import SamplingParams

        async def one(prompt: str) -> str:
            params = SamplingParams(temperature=0, max_tokens=48)
            async for output in self.engine.generate(prompt, params, prompt):
                last = output
            return last.outputs[0].text

        return dict(zip(prompts, await asyncio.gather(*map(one, prompts)), strict=True))

    def shutdown(self) -> None:
        self.engine.shutdown()


def test_a_replica_that_is_given_its_configuration(cluster: str, texts: dict[str, str]) -> None:
    import ray
    import ray_data
    from ray_metrics import endpoints, totals

    before = sum((totals(url) for url in endpoints().values()), Counter[str]())
    variables = {"env_vars": {**ray_data.ENVIRONMENT, "VLLM_PLUGINS": ""}}
    front_end = ray.remote(FrontEnd).options(num_cpus=2, runtime_env=variables)
    actor = front_end.remote(ray_data.TARGET, {**ray_data.ENGINE, "speculative_config": ray_data.SPECULATION})
    prompts = list(texts)[:16]
    assert ray.get(actor.generate.remote(prompts)) == {prompt: texts[prompt] for prompt in prompts}

    def more() -> bool:
        now = sum((totals(url) for url in endpoints().values()), Counter[str]())
        names = ("adaptive_tree_nodes", "spec_decode_num_accepted_tokens")
        return all(now[name] > before[name] for name in names)

    wait_for(more, 30, "figures of a front end that is given its configuration")
    ray.get(actor.shutdown.remote())
