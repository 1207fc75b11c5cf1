"""Processes of the examples: started, inspected, killed, and ended."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
Found = TypeVar("Found")


def environment() -> dict[str, str]:
    """Environment of this process, for processes that shall find this checkout and ask no hub."""
    paths = [str(ROOT), str(EXAMPLES), os.environ.get("PYTHONPATH")]
    chosen = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | chosen


@contextlib.contextmanager
def running(script: str, log: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an example in the block, and end it afterwards: then none of its replicas and engines is left."""
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**environment(), **variables}, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent
        )
    others: list[psutil.Process] = []
    try:
        yield process
        others = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        served = [
            one for one in others if one.name().startswith(("VLLM::", "ray::Serve"))
        ]  # Ray's agents take a minute
        process.terminate()
        assert process.wait(90) == 0, log.read_text()[-4000:]
        wait_for(lambda: not any(map(_runs, served)), 60, f"the end of what {script} started")
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            others += psutil.Process(process.pid).children(recursive=True)
        for one in (process, *others):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def engine_cores(pid: int) -> list[psutil.Process]:
    """vLLM's engine cores among the descendants of a process."""
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.cmdline()[:1] == ["VLLM::EngineCore"]:
                found.append(one)
    return found


def _runs(process: psutil.Process) -> bool:
    """Return whether the process runs; one whose parent ended before it did may stay uncollected."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_for(condition: Callable[[], Found], seconds: float, what: str) -> Found:
    """Wait for the first true value that `condition` returns."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.3)
    return found
