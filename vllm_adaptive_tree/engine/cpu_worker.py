"""vLLM's CPU worker with our model runner, V1 or V2."""

from pathlib import Path
from typing import Any

from vllm.v1.worker import cpu_worker

from vllm_adaptive_tree.amx import allow_amx
from vllm_adaptive_tree.engine.drafts.registry import kind_in
from vllm_adaptive_tree.engine.installation import here
from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.startup.finish import available_memory, finish_startup, save_profile, tree_options
from vllm_adaptive_tree.engine.v1 import startup_costs
from vllm_adaptive_tree.engine.v1.recorder import Recorder
from vllm_adaptive_tree.engine.v1.runner import TreeModelRunner


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

    def determine_available_memory(self) -> int:
        return available_memory(self, super().determine_available_memory())

    def compile_or_warm_up_model(self) -> Any:
        times, runner = super().compile_or_warm_up_model(), self.model_runner
        if self.use_v2_model_runner:
            from vllm_adaptive_tree.engine.v2 import startup_costs as measures

            finish_startup(runner, self.rank, measures)
            return times
        finish_startup(runner, self.rank, startup_costs)
        startup_costs.warm_up(runner, runner.options.num_speculative_tokens)
        runner.clock.take()  # of the warm-up
        return times

    def shutdown(self) -> None:
        save_profile(self)
        super().shutdown()

    # -- for `LLM.collective_rpc`, also of engines in other processes: plain values only

    def installation(self) -> dict[str, str]:
        """Name of this rank's node, and the packages installed there."""
        return here()

    def record(self, kind: str, options: dict[str, Any]) -> None:
        """Start collecting examples of a kind of `gates.examples.EXAMPLE_BUILDERS`, on rank 0."""
        if self.use_v2_model_runner:
            raise ValueError("examples are recorded on Model Runner V1; unset VLLM_USE_V2_MODEL_RUNNER")
        draft = kind_in(tree_options(self.vllm_config))
        if kind == "mcsd-type1" and not draft.node_states:
            raise ValueError(
                f"--type type1 reads the draft's hidden states, and {draft.name!r} has none; use --type type2"
            )
        if self.rank == 0:
            self.model_runner.recorder = Recorder(kind, options)

    def save_recorded(self, file: str, progress: dict[str, list[int] | None]) -> int:
        """Write what was recorded since the last call; returns the number of trees."""
        recorder = self.model_runner.recorder
        return 0 if recorder is None else recorder.save(Path(file), progress)
