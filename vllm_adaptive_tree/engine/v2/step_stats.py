"""Per-step statistics, read with the step's tokens after vLLM's own wait: no extra sync. The number of dead rows
arrives two steps later."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_adaptive_tree.engine.metrics.step_figures import BUDGET, CHECK, DRAFT, SCHEDULER, StepFigures, by_depth
from vllm_adaptive_tree.engine.v2.budget import DeviceBudget
from vllm_adaptive_tree.engine.v2.phase_times import PhaseTimes
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback, HostCopy
from vllm_adaptive_tree.trees import TreeBatch


class StepTrees(NamedTuple):
    """Trees of a step, before any cut."""

    names: Sequence[str]
    depth: HostCopy  # [R, N], 0: no node
    rests: bool  # True if look-ups made them while the draft rested
    without_draft: Collection[str]  # requests for which the draft rested alone

    def sizes(self) -> dict[str, int]:
        return dict(zip(self.names, (self.depth.read().numpy() > 0).sum(1).tolist(), strict=True))


class StepStats:
    def __init__(self, device: torch.device) -> None:
        self.times, self.readback = PhaseTimes(device), AsyncReadback()
        self.depth: HostCopy | None = None  # [R, N] of this step's verified nodes, 0: none
        self.before: StepTrees | None = None  # the trees that this step verifies
        self.grown: StepTrees | None = None  # those of the next
        self.dead = 0  # rows of the draft without a distribution

    def verified(self, tree: TreeBatch) -> None:
        self.depth = HostCopy.of(torch.where(tree.valid, tree.depth, 0))

    def drafted(
        self, names: Sequence[str], tree: TreeBatch, *, rests: bool, without_draft: Collection[str] = ()
    ) -> None:
        """Note the trees of requests [R] with these names; the rest as of `StepTrees`."""
        self.grown = StepTrees(names, HostCopy.of(tree.depth), rests, without_draft)

    def lost(self, dead: Tensor) -> None:
        """Note `dead` []: the number of draft rows of this step without a distribution."""
        self.readback.send(dead, self._add_dead)

    def on(self, output: Any, budget: DeviceBudget | None, *, off: bool) -> AsyncModelRunnerOutput:
        """vLLM's `output` of a step, with its figures once it is read. `off`: trees are switched off."""
        self.readback.next_step()
        dead, self.dead = self.dead, 0
        depth, self.depth = self.depth, None
        before, self.before, self.grown = self.before, self.grown, None
        begun, seconds = StepFigures.begun(budget, dead=dead), self.times.take()
        unverified = SCHEDULER if budget is None else BUDGET

        def figures(names: Sequence[str]) -> StepFigures:
            verified = np.zeros((len(names), 0)) if depth is None else depth.read().numpy()
            rows, sizes = (verified > 0).sum(1).tolist(), {} if before is None else before.sizes()
            resting = names if before is None or before.rests else before.without_draft
            nothing = {name: BUDGET if name in resting else DRAFT for name in names}
            reasons = [CHECK if off else unverified if sizes.get(name) else nothing[name] for name in names]
            return replace(
                begun,
                seconds=seconds(),
                nodes=by_depth(verified[verified > 0].tolist()),
                drafted=sum(sizes.values()),
                has_lookup_trees=before is not None and before.rests,
                rows=rows,
                fallback_reasons=["" if count else reason for count, reason in zip(rows, reasons, strict=True)],
            )

        return OutputWithFigures(output, figures)

    def _add_dead(self, dead: Tensor) -> None:
        self.dead += int(dead)


class OutputWithFigures(AsyncModelRunnerOutput):
    """vLLM's output of a step with its figures."""

    def __init__(self, output: AsyncModelRunnerOutput, figures: Callable[[Sequence[str]], StepFigures]):
        """`figures`: of the requests with these names, in the order of the output."""
        self.output, self.figures = output, figures

    def get_output(self) -> Any:
        output = self.output.get_output()
        output.cudagraph_stats = self.figures(output.req_ids).stat()
        return output

    def get_kv_connector_output(self) -> Any:
        """Connector output, which vLLM 0.33 asks for if the step has failed."""
        return self.output.get_kv_connector_output()
