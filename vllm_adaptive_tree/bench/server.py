"""vLLM's server in processes of its own, and its clients."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from vllm_adaptive_tree.bench.background_load import BackgroundLoad
from vllm_adaptive_tree.bench.offline import Setup
from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.request_timing import Counters, RequestTiming, measurement, peak_memory
from vllm_adaptive_tree.bench.rounds import Measurement
from vllm_adaptive_tree.bench.workloads import prompt_indices

NAME = "bench"
START_SECONDS = 600.0
STOP_SECONDS = 20.0
PR_SET_PDEATHSIG = 1  # of Linux


class Server:
    """vLLM's server; raises RuntimeError if it fails to start. Its output is in `log`."""

    def __init__(self, config: Config, setup: Setup, log: Path):
        self.setup, self.name, self.log = setup, config.name, log
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = self._start(config, port)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def measure(self, cell: Cell, number: int) -> Measurement:
        prompts = self.setup.prompts
        chosen = [prompts[index] for index in prompt_indices(cell, number, len(prompts))]
        before, background = self._counters(), BackgroundLoad([*self._family(), os.getpid()])
        requests, seconds = asyncio.run(self._ask(chosen, cell.concurrency))
        cores = background.cores()
        return measurement(requests, seconds, self._counters().since(before), peak_memory(self._family()), cores)

    def close(self) -> None:
        """End the server's whole process group, which includes the engine's process."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _start(self, config: Config, port: int) -> "subprocess.Popen[bytes]":
        # not `vllm serve`: that needs a distribution named vllm, which its CPU build is not
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--served-model-name", NAME, "--disable-uvicorn-access-log"]
        for name, value in self.setup.arguments().items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{option}" if value else f"--no-{option}")
            else:
                command += [f"--{option}", str(value)]
        if config.speculation is not None:
            command += ["--speculative-config", json.dumps(config.speculation)]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
                env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            )

    def _wait(self) -> None:
        started = time.monotonic()
        while time.monotonic() - started < START_SECONDS:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server of {self.name!r} ended with code {self.process.returncode}; see {self.log}"
                )
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.5)
        raise RuntimeError(f"the server of {self.name!r} was not ready after {START_SECONDS:.0f} s; see {self.log}")

    async def _ask(self, prompts: Sequence[str], clients: int) -> tuple[list[RequestTiming], float]:
        """Send the prompts; every client sends its next one when the previous answer is complete."""
        import aiohttp

        free = asyncio.Semaphore(clients)

        async def ask(session: Any, prompt: str) -> RequestTiming:
            async with free:
                return await self._request(session, prompt)

        timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20) as session:
            started = time.perf_counter()
            requests = await asyncio.gather(*(ask(session, prompt) for prompt in prompts))
            return requests, time.perf_counter() - started

    async def _request(self, session: Any, prompt: str) -> RequestTiming:
        body = {
            "model": NAME,
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": self.setup.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "truncate_prompt_tokens": self.setup.max_model_len - self.setup.max_tokens,
        }
        timing = RequestTiming()
        async with session.post(f"{self.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(
                    f"the server of {self.name!r} answered {answer.status}: {(await answer.text())[:500]}"
                )
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    data = json.loads(line[6:])
                    if "error" in data:
                        raise RuntimeError(f"the server of {self.name!r} answered {data['error']}")
                    tokens = data["choices"][0].get("token_ids") if data["choices"] else None
                    if tokens:
                        timing.add(tokens, time.perf_counter())
        return timing

    def _counters(self) -> Counters:
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return Counters.read((sample.name, sample.labels, float(sample.value)) for sample in samples)

    def _family(self) -> list[int]:
        return [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))]


def _end_with_parent() -> None:
    """Run in the child before the server: it gets SIGTERM when this process is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
