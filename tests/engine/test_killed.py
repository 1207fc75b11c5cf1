"""A process of a server is killed: clients are told, the server says why and ends, and nothing stays behind."""

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI, OpenAIError

from tests.engine.engines import PROMPTS, V2, one_core_each
from tests.engine.test_server import API_SERVER, GREEDY, metric, started

pytestmark = pytest.mark.skipif(V2, reason="the interpreter is slow")


def below(process: int) -> dict[int, str]:
    """The processes that descend from it, and their names."""
    found, parents = dict[int, str](), dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int(re.findall(r"\) \S (\d+)", (folder / "stat").read_text())[-1])
            found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()

    def descends(one: int) -> bool:
        return one in parents and (parents[one] == process or descends(parents[one]))

    return {one: name for one, name in found.items() if descends(one)}


def test_a_killed_engine_core(tmp_path: Path) -> None:
    reason = "Engine core proc EngineCore.* died unexpectedly|EngineDeadError"
    kill("VLLM::EngineCore", API_SERVER, {}, tmp_path / "log", reason)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(rank: int, tmp_path: Path) -> None:
    module, threads = [*API_SERVER, "--tensor-parallel-size", "2"], {"VLLM_CPU_OMP_THREADS_BIND": one_core_each(2)}
    kill(f"VLLM::Worker_TP{rank}", module, threads, tmp_path / "log", rf"Worker proc \S+-{rank} died unexpectedly")


def kill(name: str, module: list[str], environment: dict[str, str], log: Path, reason: str) -> None:
    """Kill the process whose name begins so while a server answers a request. `reason`: what its log has to say."""
    with started(module, {"VLLM_LOGGING_LEVEL": "INFO", **environment}, log) as (url, server):
        processes = below(server.pid)
        (victim,) = (one for one, called in processes.items() if called.startswith(name))
        failed: list[OpenAIError] = []

        def ask() -> None:
            try:
                with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                    body: dict[str, Any] = {**GREEDY, "max_tokens": 400}
                    client.completions.create(prompt=PROMPTS[:4], **body, extra_body={"ignore_eos": True})
            except OpenAIError as error:
                failed.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        for _ in range(600):
            if metric(url, "num_requests_running") > 0:
                break
            assert failed == []
            time.sleep(0.1)
        os.kill(victim, signal.SIGKILL)
        asking.join(60)
        assert len(failed) == 1, "the request is answered by an error"
        assert server.wait(60) is not None, "the server ends"
        for _ in range(60):
            left = {one: called for one, called in processes.items() if _state(one) != "Z"}
            if not left:
                break
            time.sleep(0.5)
        assert left == {}, "nothing stays behind"
    assert re.search(reason, log.read_text()), log.read_text()[-3000:]


def _state(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"
