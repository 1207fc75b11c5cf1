from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker import cpu_worker

from vllm_adaptive_tree.budget import FREE, Controller, Costs, Sharpening
from vllm_adaptive_tree.engine.budget import BatchBudget
from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.profile import measured_costs, measured_threshold
from vllm_adaptive_tree.engine.recorder import Recorder
from vllm_adaptive_tree.engine.runner_v1 import TreeModelRunner
from vllm_adaptive_tree.method_options import OptTreeOptions
from vllm_adaptive_tree.methods import GREEDY_DRAFT_TEMPERATURE

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
            fits = isinstance(tree, OptTreeOptions) and tree.draft_temperature == "auto" and tree.budget == "auto"
            runner.budget = BatchBudget(
                self._controller(runner),
                runner.proposer,
                runner.clock,
                steers=steers,
                sharpening=Sharpening(GREEDY_DRAFT_TEMPERATURE) if fits else None,
            )
        runner.clock.take()  # of the warm-up
        return times

    def _controller(self, runner: TreeModelRunner) -> Controller:
        tree, sampled = runner.options.tree, runner.proposer.kind != "one_hot"
        if isinstance(tree.budget, int):
            return Controller(Costs(FREE), sampled=sampled, most=tree.budget)
        file = None if tree.cost_profile is None else Path(tree.cost_profile).expanduser()
        if file is not None and file.exists():
            costs, source = Costs.read(file), f"from {file}"
        else:
            most = min(256, runner.scheduler_config.max_num_batched_tokens)
            costs, source = measured_costs(runner, runner.options.num_speculative_tokens, most), "measured"
            if file is not None and self.rank == 0:
                costs.write(file)
        logger.info("tree budget 'auto': %s, %s", source, costs)
        return Controller(costs, sampled=sampled)

    # -- for `LLM.collective_rpc`: plain values only, so that it reaches engines in other processes

    def record(self, kind: str, options: dict[str, Any]) -> None:
        """Begin to collect examples of a kind of `gates.examples.KINDS`, on rank 0."""
        if self.rank == 0:
            self.model_runner.recorder = Recorder(kind, options)

    def save_recorded(self, file: str, progress: dict[str, list[int] | None]) -> int:
        """Write what was recorded since the last call; the number of trees."""
        recorder = self.model_runner.recorder
        return 0 if recorder is None else recorder.save(Path(file), progress)
