"""Real engines on the bundled pair, in this process, float32 and eager unless a test says otherwise."""

import os

os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
)

from collections.abc import Iterator

import pytest

from tests.engine.engines import Engines


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """One engine alive at a time; the next `start` shuts the last one down."""
    pool = Engines()
    yield pool
    pool.shutdown()
