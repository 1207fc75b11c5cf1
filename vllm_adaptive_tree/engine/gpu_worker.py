"""vLLM's GPU worker with our model runner."""

from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_worker

from vllm_adaptive_tree.engine import gpu_arguments
from vllm_adaptive_tree.engine.common.startup import available_memory, finish_startup, save_profile
from vllm_adaptive_tree.engine.installation import here
from vllm_adaptive_tree.engine.v2 import startup_costs
from vllm_adaptive_tree.engine.v2.runner import TreeModelRunnerV2

logger = init_logger(f"vllm.{__name__}")


class TreeGPUWorker(gpu_worker.Worker):
    def _make_model_runner(self) -> Any:
        gpu_arguments.check_device()  # a node may have other GPUs than the one of the front end
        return TreeModelRunnerV2(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        return available_memory(self, super().determine_available_memory())

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        finish_startup(self.model_runner, self.rank, startup_costs)
        self._verify()
        return times

    def _verify(self) -> None:
        """Whether this device computes trees as the CPU does: nothing here tells, so the log says it."""
        if self.rank == 0:
            logger.warning(
                "NOT VERIFIED on %s: no release of vllm-adaptive-tree has run on a GPU yet. Its kernels are tested in "
                "Triton's interpreter and compiled ahead of time, and nothing has compared them with vLLM's own on "
                "this device; compare texts with and without a tree method before you rely on them (docs/gpu.md)",
                current_platform.get_device_name(),
            )

    def shutdown(self) -> None:
        save_profile(self)
        super().shutdown()

    def installation(self) -> dict[str, str]:
        """The node of this rank, and what is installed there; for `LLM.collective_rpc`."""
        return here()
