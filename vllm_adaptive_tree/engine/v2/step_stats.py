"""The figures of a step. They are read where vLLM reads the step's tokens, behind the same wait, so they delay nothing;
the number of dead rows arrives two steps later."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_adaptive_tree.engine.common.step_figures import BUDGET, CHECK, DRAFT, SCHEDULER, StepFigures, by_depth
from vllm_adaptive_tree.engine.v2.budget import DeviceBudget
from vllm_adaptive_tree.engine.v2.phase_times import PhaseTimes
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback, HostCopy
from vllm_adaptive_tree.trees import TreeBatch


class Grown(NamedTuple):
    """The trees of a step, before any cut."""

    names: Sequence[str]
    depth: HostCopy  # [R, N], 0: no node
    rests: bool  # the draft rested: look-ups made them

    def sizes(self) -> dict[str, int]:
        return dict(zip(self.names, (self.depth.read() > 0).sum(1).tolist(), strict=True))


class StepStats:
    def __init__(self, device: torch.device) -> None:
        self.times, self.readback = PhaseTimes(device), AsyncReadback()
        self.depth: HostCopy | None = None  # [R, N] of this step's verified nodes, 0: none
        self.before: Grown | None = None  # the trees that this step verifies
        self.grown: Grown | None = None  # those of the next
        self.dead = 0  # rows of the draft

    def verified(self, tree: TreeBatch) -> None:
        self.depth = HostCopy.of(torch.where(tree.valid, tree.depth, 0))

    def drafted(self, names: Sequence[str], tree: TreeBatch, *, rests: bool) -> None:
        """Trees of requests [R] with these names."""
        self.grown = Grown(names, HostCopy.of(tree.depth), rests)

    def lost(self, dead: Tensor) -> None:
        """`dead` []: the number of draft rows of this step without a distribution."""
        self.readback.send(dead, self._add_dead)

    def on(self, output: Any, budget: DeviceBudget | None, *, off: bool) -> AsyncModelRunnerOutput:
        """vLLM's `output` of a step, with its figures once it is read. `off`: trees are switched off."""
        self.readback.next_step()
        dead, self.dead = self.dead, 0
        depth, self.depth = self.depth, None
        before, self.before, self.grown = self.before, self.grown, None
        expected, observed = (0.0, 0.0) if budget is None else budget.budget.take()
        known = StepFigures(
            expected=expected, observed=observed, dead=dead, gauges={} if budget is None else budget.gauges
        )
        seconds = self.times.take()
        unverified = SCHEDULER if budget is None else BUDGET

        def figures(names: Sequence[str]) -> StepFigures:
            rows = [0] * len(names) if depth is None else (depth.read() > 0).sum(1).tolist()
            sizes = {} if before is None else before.sizes()
            without: dict[str, list[int]] = {}
            for row, name in enumerate(names):
                if not rows[row]:
                    nothing = BUDGET if before is None or before.rests else DRAFT
                    reason = CHECK if off else unverified if sizes.get(name) else nothing
                    without.setdefault(reason, []).append(row)
            known.seconds, known.drafted = seconds(), sum(sizes.values())
            known.nodes = {} if depth is None else by_depth(depth.read()[depth.read() > 0].tolist())
            known.rows, known.without = rows, without
            return known

        return OutputWithFigures(output, figures)

    def _add_dead(self, dead: Tensor) -> None:
        self.dead += int(dead)


class OutputWithFigures(AsyncModelRunnerOutput):
    """vLLM's output of a step, and its figures."""

    def __init__(self, output: AsyncModelRunnerOutput, figures: Callable[[Sequence[str]], StepFigures]):
        """`figures`: of the requests with these names, in the order of the output."""
        self.output, self.figures = output, figures

    def get_output(self) -> Any:
        found = self.output.get_output()
        found.cudagraph_stats = self.figures(found.req_ids).stat()
        return found

    def get_kv_connector_output(self) -> Any:
        """vLLM 0.33 asks, if the step has failed."""
        return self.output.get_kv_connector_output()
