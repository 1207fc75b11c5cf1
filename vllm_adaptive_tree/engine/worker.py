from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker import cpu_worker

from vllm_adaptive_tree.budget import FREE, Controller, read_profile, write_profile
from vllm_adaptive_tree.engine.budget import BatchBudget
from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.profile import measured_threshold, verification_curve
from vllm_adaptive_tree.engine.recorder import Recorder
from vllm_adaptive_tree.engine.runner_v1 import TreeModelRunner
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
        tree = runner.options.tree
        if tree.budget is not None:
            steers = isinstance(tree, OptTreeOptions) and tree.threshold is None and tree.budget == "auto"
            runner.budget = BatchBudget(self._controller(runner), runner.proposer, runner.clock, steers=steers)
        runner.clock.take()  # of the warm-up
        return times

    def _controller(self, runner: TreeModelRunner) -> Controller:
        tree, sampled = runner.options.tree, runner.proposer.kind != "one_hot"
        if isinstance(tree.budget, int):
            return Controller(FREE, sampled=sampled, most=tree.budget)
        file = None if tree.cost_profile is None else Path(tree.cost_profile).expanduser()
        if file is not None and file.exists():
            verify, source = read_profile(file), f"from {file}"
        else:
            verify, source = (
                verification_curve(runner, min(256, runner.scheduler_config.max_num_batched_tokens)),
                "measured",
            )
            if file is not None and self.rank == 0:
                write_profile(file, verify)
        points = zip(verify.rows.tolist(), verify.seconds.tolist(), strict=True)
        shown = ", ".join(f"{rows:.0f}: {1000 * seconds:.2f}" for rows, seconds in points)
        logger.info("tree budget 'auto': ms of a verification by rows, %s: %s", source, shown)
        return Controller(verify, sampled=sampled)

    # -- for `LLM.collective_rpc`: plain values only, so that it reaches engines in other processes

    def record(self, kind: str, options: dict[str, Any]) -> None:
        """Begin to collect examples of a kind of `gates.examples.KINDS`, on rank 0."""
        if self.rank == 0:
            self.model_runner.recorder = Recorder(kind, options)

    def save_recorded(self, file: str, progress: dict[str, list[int] | None]) -> int:
        """Write what was recorded since the last call; the number of trees."""
        recorder = self.model_runner.recorder
        return 0 if recorder is None else recorder.save(Path(file), progress)
