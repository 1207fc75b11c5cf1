"""vLLM's GPU worker with our model runner, and what a worker settles once the models are loaded."""

from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.worker import gpu_worker

from vllm_adaptive_tree.budget import Controller, Sharpening
from vllm_adaptive_tree.engine.cost_profile import starting_costs
from vllm_adaptive_tree.engine.v2.profile import measured_costs, measured_threshold
from vllm_adaptive_tree.engine.v2.runner import TreeModelRunnerV2
from vllm_adaptive_tree.method_options import OptTreeOptions
from vllm_adaptive_tree.methods import GREEDY_DRAFT_TEMPERATURE

logger = init_logger(f"vllm.{__name__}")


class TreeGPUWorker(gpu_worker.Worker):
    def _make_model_runner(self) -> Any:
        return TreeModelRunnerV2(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        settle(self.model_runner, self.rank)
        return times


def settle(runner: Any, rank: int) -> None:
    tree, nodes = runner.options.tree, runner.options.num_speculative_tokens
    if isinstance(tree, OptTreeOptions) and tree.threshold == "auto":
        runner.pair.proposer.threshold = measured_threshold(runner, nodes)
        logger.info("tree threshold 'auto': %.3f tokens per level, measured", runner.pair.proposer.threshold)
    if tree.budget == "auto":
        costs = starting_costs(tree.cost_profile, lambda: measured_costs(runner, nodes), rank=rank)
        # The number of nodes is chosen before the trees are drawn, so any choice is lossless.
        runner.budget.controller = Controller(costs, sampled=False)
        alone = get_tp_group().world_size == 1
        runner.budget.live = alone
        if alone and isinstance(tree, OptTreeOptions) and tree.draft_temperature == "auto":
            runner.budget.sharpening = Sharpening(GREEDY_DRAFT_TEMPERATURE)
