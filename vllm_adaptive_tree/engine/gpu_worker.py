"""vLLM's GPU worker with our model runner."""

from typing import Any

from vllm.v1.worker import gpu_worker

from vllm_adaptive_tree.engine.installation import here
from vllm_adaptive_tree.engine.self_check import check
from vllm_adaptive_tree.engine.self_check.warm_up import warm_up
from vllm_adaptive_tree.engine.startup.finish import available_memory, finish_startup, save_profile
from vllm_adaptive_tree.engine.targets import gpu_arguments
from vllm_adaptive_tree.engine.v2 import startup_costs
from vllm_adaptive_tree.engine.v2.runner import TreeModelRunnerV2


class TreeGPUWorker(gpu_worker.Worker):
    def _make_model_runner(self) -> Any:
        gpu_arguments.check_device()  # a node may have other GPUs than the one of the front end
        return TreeModelRunnerV2(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        return available_memory(self, super().determine_available_memory())

    def _maybe_activate_jit_monitor(self) -> None:
        """Check and measure at the end of vLLM's warm-up, before it watches for kernels that are compiled late."""
        check.start(self.model_runner)
        if not self.model_runner.off:
            warm_up(self.model_runner)
            finish_startup(self.model_runner, self.rank, startup_costs)
        super()._maybe_activate_jit_monitor()

    def shutdown(self) -> None:
        save_profile(self)
        super().shutdown()

    def installation(self) -> dict[str, str]:
        """Name of this rank's node, and the packages installed there; for `LLM.collective_rpc`."""
        return here()
