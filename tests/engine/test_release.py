"""For `python -m tests.next`: the release that it names is what runs, in every process."""

import os
from typing import Any

import pytest
import vllm

from tests.engine.engines import TARGET, tree

RELEASE = os.environ.get("TESTED_VLLM", "")

pytestmark = pytest.mark.skipif(not RELEASE, reason="`python -m tests.next` names a release")


def release_of(worker: Any) -> tuple[str, str, int]:
    """Version, class and process of a worker."""
    return vllm.__version__, type(worker.worker).__name__, os.getpid()


def test_every_process_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm.__version__ == RELEASE
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }.items():
        monkeypatch.setenv(name, value)
    llm = vllm.LLM(TARGET, speculative_config=tree(4), dtype="float32", enforce_eager=True, max_model_len=64)
    try:
        [(version, worker, process)] = llm.collective_rpc(release_of)
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert (version, worker) == (RELEASE, "TreeWorker")
    assert process != os.getpid()
