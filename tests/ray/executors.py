"""vLLM's Ray executors on CPUs, for tests: `distributed_executor_backend="tests.ray.executors.RayCPUExecutor"`.

vLLM refuses a CPU there because Ray has no resource for its ranks and no ids of its devices. Here a rank takes one unit
of a custom resource of its node (`ray start --resources '{"rank": 1}'`), so Ray places it as it places GPUs; placement
group, actors, queues and process groups are vLLM's own. Imports nothing of this project: a test's node may lack it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2, ray_utils

try:
    from vllm.v1.executor import ray_executor
except ImportError:  # gone in vLLM 0.33
    ray_executor = None

RESOURCE = "TEST_RAY_RESOURCE"
"""Environment variable that names the resource, unless it is `rank`."""


class Rank(ray_executor_v2.RayWorkerProc):
    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), []

    def initialize_worker(self, *args: Any, assigned_physical_gpu_ids: Any, **kwargs: Any) -> None:
        super().initialize_worker(*args, **kwargs)


class RayCPUExecutor(ray_executor_v2.RayExecutorV2):
    def _init_executor(self) -> None:
        with _on_cpus(self.parallel_config, ray_executor_v2, "RayWorkerProc", Rank):
            super()._init_executor()


@contextmanager
def _on_cpus(config: Any, module: Any, name: str, rank: type) -> Iterator[None]:
    """Set up the process of the executor: the platform has a resource, ranks are of the class above, and to the rest of
    vLLM the backend is "ray"."""
    config.distributed_executor_backend = "ray"
    type(current_platform).ray_device_key = os.environ.get(RESOURCE, "rank")
    original = getattr(module, name)
    setattr(module, name, rank)
    try:
        yield
    finally:
        setattr(module, name, original)


if ray_executor is not None:

    class OldRank(ray_utils.RayWorkerWrapper):
        def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
            return ray.get_runtime_context().get_node_id(), []

        def init_worker(self, all_kwargs: list[dict[str, Any]]) -> None:
            super().init_worker([{**kwargs, "assigned_physical_gpu_ids": None} for kwargs in all_kwargs])

    class OldRayCPUExecutor(ray_executor.RayDistributedExecutor):
        def _init_executor(self) -> None:
            with _on_cpus(self.parallel_config, ray_executor, "RayWorkerWrapper", OldRank):
                super()._init_executor()
