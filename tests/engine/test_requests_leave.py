"""State of a request in the worker, which leaves with it: served one by one, aborted, preempted, or of an old name."""

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engines import DRAFT, PROMPTS, TARGET, V2, Engines, metric, runner_of
from tests.engine.heads import eagle3
from vllm_adaptive_tree.budget import Costs, Planner
from vllm_adaptive_tree.engine.v1.drafts import Draft

NAME = "leaving-"
REQUESTS = 200
KEPT = {"backlog.blocks"} if V2 else {"engine.drafts", "seeds.by_request", "drafter.contexts.requests"}
"""Of a draft model; a head reads every step, so it has no backlog."""
VLLMS_OWN = {"requests", "_draft_token_req_ids", "draft_tokens_handler.req_ids"}  # the latter two of the last step
LAST_STEP = {"engine.fallback_reasons", "stats.before", "stats.grown"}
"""For the metrics: names of one batch, which the next one replaces."""


def held(worker: Any) -> list[str]:
    """Places where the runner, and our objects in it, keep a request's name, tree or blocks."""
    found: set[str] = set()
    seen: set[int] = set()

    def walk(thing: Any, path: str) -> None:
        if isinstance(thing, str):
            if thing.startswith(NAME):
                found.add(path)
        elif isinstance(thing, Draft):
            found.add(path)
        elif id(thing) not in seen:
            seen.add(id(thing))
            if isinstance(thing, dict):
                for name, one in thing.items():
                    walk(name, path)
                    walk(one, path)
            elif isinstance(thing, list | tuple | set | deque):
                for one in thing:
                    walk(one, path)
            elif type(thing).__module__.startswith("vllm_adaptive_tree"):
                for name in getattr(thing, "__dict__", None) or getattr(thing, "__slots__", ()):
                    walk(getattr(thing, name), f"{path}.{name}".removeprefix("."))

    runner = worker.model_runner
    walk(runner, "")
    if V2 and runner.speculator.backlog is not None and any(runner.speculator.backlog.blocks):
        found.add("backlog.blocks")
    return sorted(found - VLLMS_OWN - LAST_STEP)


def drafts_pay(worker: Any) -> None:
    """By the costs that this engine has measured."""
    runner = worker.model_runner
    flat = {"rows": [1, 1000], "seconds": [0.5, 0.5]}
    costs = Costs.from_json({"verify": flat, "draft": {**flat, "seconds": [1e-9, 1e-9]}, "context": 0.0})
    runner.begin_budget(Planner(costs, sampled=runner.cuts_sampled))


@pytest.fixture
def config() -> dict[str, Any]:
    """Drawn trees whose laws are kept, without a seed."""
    tree = {"budget": "auto", "cost_profile": None}
    return {"method": "dyspec", "model": DRAFT, "num_speculative_tokens": 8, "tree": tree}


def sampled(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)


@pytest.mark.skipif(V2, reason="the interpreter is slow")
def test_one_by_one_through_a_server_s_engine(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # a function for the worker

    async def held_by(engine: Any, *, when_idle: bool) -> set[str]:
        """`when_idle`: the step that tells the worker of the last request's end may still come."""
        for _ in range(100):
            (found,) = await engine.collective_rpc(held)
            if not (when_idle and found):
                break
            await asyncio.sleep(0.02)
        return set(found)

    async def run() -> None:
        arguments = AsyncEngineArgs(
            model=TARGET, dtype="float32", enforce_eager=True, max_model_len=512, speculative_config=config
        )
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            await engine.collective_rpc(drafts_pay)
            for i in range(REQUESTS):
                async for _ in engine.generate(PROMPTS[i % 16], sampled(3 + i % 4), request_id=f"{NAME}{i}"):
                    pass
            assert await held_by(engine, when_idle=True) == set()
            await engine.collective_rpc(drafts_pay)  # live steps have said otherwise meanwhile
            aborted = engine.generate(PROMPTS[0], sampled(480), request_id=f"{NAME}aborted")
            for _ in range(2):
                await anext(aborted)
            assert await held_by(engine, when_idle=False) >= KEPT
            await aborted.aclose()
            assert await held_by(engine, when_idle=True) == set()
        finally:
            engine.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize("draft", ["model", "eagle3"])
def test_aborted_preempted_and_called_by_an_old_name(
    engines: Engines, config: dict[str, Any], draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with steps until the engine core has nothing left to say, as its own loop would take them. One
    request ends and comes back by its name."""
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    if draft == "eagle3":
        config = {**config, "model": eagle3(tmp_path), "tree": {**config["tree"], "draft": draft}}
    llm = engines.start(config, max_model_len=128, max_num_batched_tokens=64, num_gpu_blocks_override=8 if V2 else 24)
    engine, runner = llm.llm_engine, runner_of(llm)
    worker = engine.engine_core.engine_core.model_executor.driver_worker
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    drafts_pay(worker)
    count, tokens = (4, 40) if V2 else (16, 40)
    names = {f"{NAME}{i}": PROMPTS[i] for i in range(count)}
    for name, prompt in names.items():
        engine.add_request(name, prompt, sampled(tokens))
    # Before the worker hears of either; with a step in flight vLLM itself would give its tokens to the new request.
    back = 7 if llm.llm_engine.vllm_config.scheduler_config.async_scheduling else 6
    found: set[str] = set()
    step = 0
    while scheduler.has_requests():
        engine.step()
        step += 1
        found |= set(held(worker))
        if not V2:
            running = {request.request_id for request in scheduler.running}
            assert runner.engine.drafts.keys() <= running, "a request that does not run has a tree"
        if step == 6:
            engine.abort_request([f"{NAME}1"], internal=False)
        if step == back:
            engine.add_request(f"{NAME}1", PROMPTS[5], sampled(tokens))
    assert metric(llm, "num_preemptions") > 0
    assert found >= (KEPT if draft == "model" or not V2 else set())
    assert held(worker) == []
    assert pool.get_num_free_blocks() == free
