"""Real engines on the bundled pair, in this process, float32 and eager unless a test says otherwise.

MODEL_RUNNER=v2 runs the same files on vLLM's Model Runner V2, in Triton's interpreter; MODEL_RUNNER=v2-async with
asynchronous scheduling, v2-kernels with the kernels and the buffers of a GPU.
"""

import os

from tests import interpreter

if (RUNNER := os.environ.get("MODEL_RUNNER", "v1")) != "v1":
    interpreter.install(RUNNER)
    interpreter.install_in_children()

os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
)

import functools
import math
from collections.abc import Iterator

import pytest
import vllm
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform

from tests.engine import contract, torchvision
from tests.engine.engines import Engines
from vllm_adaptive_tree.engine.startup import finish, measuring

# `python -m tests.next` tests another release than the installed one.
assert vllm.__version__ == os.environ.get("TESTED_VLLM", vllm.__version__), f"this is vLLM {vllm.__version__}"

contract.install()

# Each start of an engine walks all names of all modules. What the first has replaced is not found a second time.
CpuPlatform.register_triton_kernel_overrides = staticmethod(
    functools.cache(CpuPlatform.register_triton_kernel_overrides)
)
# vLLM looks at each class of a model in a process of its own, ten seconds each.
registry._run_in_subprocess = lambda look: look()
# Two of these tests may share two processors: what they measure is kept all the same.
finish.DISTURBED = measuring.DISTURBED = math.inf


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """One engine alive at a time; the next `start` shuts the last one down."""
    pool = Engines()
    yield pool
    pool.shutdown()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Classes that may read images can be imported."""
    with torchvision.imported(tmp_path_factory.mktemp("packages")):
        yield
