"""A Ray cluster of several nodes on this machine, and engines that use it from processes of their own."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "RAY_USAGE_STATS_ENABLED": "0",
}


ANSWER = "ANSWER"
"""Prefix of an engine's lines that are answers."""


class Nodes:
    """Local nodes of one Ray cluster; each has its own raylet, resources and environment."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(dir="/tmp")  # sockets need short names
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("RAY_TMPDIR", self.folder)  # nothing in the place where others would look for a cluster
        self.cluster = Cluster()
        self.names: list[str] = []
        """Names of the nodes in Ray, in the order in which they were added; the first is the head's."""

    def add(self, resources: Mapping[str, float], **environment: str) -> str:
        """Start a node and return its name. Each has an address of its own, as machines have."""
        address = f"127.0.0.{len(self.names) + 2}"
        first = {} if self.cluster.head_node else {"include_dashboard": False}
        node = self.cluster.add_node(
            num_cpus=1,
            object_store_memory=100 << 20,
            resources=dict(resources),
            node_ip_address=address,
            env_vars={**ENVIRONMENT, "VLLM_HOST_IP": address, **environment},
            **first,
        )
        self.names.append(node.node_id)
        return node.node_id

    @property
    def address(self) -> str:
        return self.cluster.address

    def shutdown(self) -> None:
        self.cluster.shutdown()
        self.patch.undo()
        shutil.rmtree(self.folder, ignore_errors=True)


class Engine:
    """vLLM's `LLM` in a process of its own (`tests/ray/engine.py`); a test waits for it with a time limit."""

    def __init__(self, arguments: Mapping[str, Any], **environment: str):
        self.answers: Queue[Any] = Queue()
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray.engine", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **environment},
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                self.answers.put(json.loads(line.removeprefix(ANSWER)))
            else:
                self.lines.append(line)

    def ask(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float) -> Any:
        """Next answer; AssertionError with the output instead if there is none in time."""
        late = time.monotonic() + seconds
        while self.answers.empty():
            ended = self.process.poll() is not None and not self.reader.is_alive()
            assert not ended, f"ended with {self.process.returncode}: {self.written()}"
            assert time.monotonic() < late, f"nothing in {seconds} seconds: {self.written()}"
            time.sleep(0.05)
        return self.answers.get()

    def ended(self, seconds: float) -> str:
        """Output of the engine, once it has ended with an error; AssertionError if it does not."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"runs on after {seconds} seconds: {self.written()}") from None
        self.reader.join(seconds)
        assert code != 0, self.written()
        return self.written()

    def written(self) -> str:
        return "".join(self.lines)

    def end(self) -> None:
        """Let it shut down; kill the remaining processes."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
