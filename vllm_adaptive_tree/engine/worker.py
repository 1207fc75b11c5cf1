from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker import cpu_worker

from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.runner_v1 import TreeModelRunner
from vllm_adaptive_tree.engine.threshold import measured_threshold
from vllm_adaptive_tree.method_options import OptTreeOptions

logger = init_logger(f"vllm.{__name__}")


class TreeWorker(cpu_worker.CPUWorker):
    """vLLM's CPU worker with our model runner."""

    model_runner: TreeModelRunner

    def init_device(self) -> None:
        with swapped(cpu_worker, "CPUModelRunner", TreeModelRunner):
            super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        runner = self.model_runner
        if isinstance(runner.options.tree, OptTreeOptions) and runner.options.tree.threshold == "auto":
            runner.proposer.threshold = measured_threshold(runner, runner.options.num_speculative_tokens)
            logger.info("tree threshold 'auto': %.3f tokens per level, measured", runner.proposer.threshold)
        return times
