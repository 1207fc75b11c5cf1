from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker import cpu_worker

from vllm_adaptive_tree.amx import allow_amx
from vllm_adaptive_tree.budget import FREE, Controller, Costs, Sharpening
from vllm_adaptive_tree.engine.budget import BatchBudget
from vllm_adaptive_tree.engine.cost_profile import starting_costs
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
        allow_amx()
        if self.use_v2_model_runner:
            from vllm.v1.worker.cpu import model_runner

            from vllm_adaptive_tree.engine.v2.runner import TreeModelRunnerV2

            with swapped(model_runner, "CPUModelRunner", TreeModelRunnerV2):
                super().init_device()
            return
        with swapped(cpu_worker, "CPUModelRunner", TreeModelRunner):
            super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        if self.use_v2_model_runner:
            from vllm_adaptive_tree.engine.v2.worker import settle

            settle(self.model_runner, self.rank)
        else:
            self._settle()
        return times

    def _settle(self) -> None:
        runner, tree = self.model_runner, self.model_runner.options.tree
        nodes = runner.options.num_speculative_tokens
        if isinstance(tree, OptTreeOptions) and tree.threshold == "auto":
            runner.proposer.threshold = measured_threshold(runner, nodes)
            logger.info("tree threshold 'auto': %.3f tokens per level, measured", runner.proposer.threshold)
        if tree.budget is not None:
            steers = isinstance(tree, OptTreeOptions) and tree.threshold is None and tree.budget == "auto"
            fits = isinstance(tree, OptTreeOptions) and tree.draft_temperature == "auto" and tree.budget == "auto"
            sampled = runner.proposer.kind != "one_hot"
            if isinstance(tree.budget, int):
                controller = Controller(Costs(FREE), sampled=sampled, most=tree.budget)
            else:
                most = min(256, runner.scheduler_config.max_num_batched_tokens)
                costs = starting_costs(tree.cost_profile, lambda: measured_costs(runner, nodes, most), rank=self.rank)
                controller = Controller(costs, sampled=sampled)
            runner.budget = BatchBudget(
                controller,
                runner.proposer,
                runner.clock,
                steers=steers,
                sharpening=Sharpening(GREEDY_DRAFT_TEMPERATURE) if fits else None,
            )
        runner.clock.take()  # of the warm-up

    # -- for `LLM.collective_rpc`: plain values only, so that it reaches engines in other processes

    def record(self, kind: str, options: dict[str, Any]) -> None:
        """Begin to collect examples of a kind of `gates.examples.KINDS`, on rank 0."""
        if self.use_v2_model_runner:
            raise ValueError("examples are recorded on Model Runner V1; unset VLLM_USE_V2_MODEL_RUNNER")
        if self.rank == 0:
            self.model_runner.recorder = Recorder(kind, options)

    def save_recorded(self, file: str, progress: dict[str, list[int] | None]) -> int:
        """Write what was recorded since the last call; the number of trees."""
        recorder = self.model_runner.recorder
        return 0 if recorder is None else recorder.save(Path(file), progress)
