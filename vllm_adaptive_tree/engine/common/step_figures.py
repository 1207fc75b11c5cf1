"""The figures of a step, from the worker over the scheduler to the front end.

They travel as text in `cudagraph_stats`: the scheduler passes it on from `ModelRunnerOutput` to `SchedulerStats`
unread, and vLLM's own readers look at it only with `cudagraph_metrics`, which a tree method refuses. So a front end
without our patches ignores them. Between processes vLLM decodes the slot by its types; text holds everything.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from vllm.compilation.cuda_graph import CUDAGraphStat

KEY = "adaptive_tree"

BUDGET, DRAFT, SCHEDULER, CHECK = "budget", "draft", "scheduler", "check"
REASONS = {
    BUDGET: "the budget let the draft rest, or verified none of the nodes",
    DRAFT: "the draft proposed nothing: no continuation, no distribution, no room, or tokens left to read",
    SCHEDULER: "the scheduler kept none of the nodes",
    CHECK: "the start-up check has switched trees off",
}
"""Why a request decodes a step without a tree."""


@dataclass
class StepFigures:
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, since the last step."""
    nodes: dict[str, int] = field(default_factory=dict)
    """Verified, by depth."""
    drafted: int = 0
    """Nodes of the trees that were drafted, before any cut."""
    expected: float = 0.0
    """Verified nodes that the budget expected to be accepted."""
    observed: float = 0.0
    """Those that were."""
    dead: int = 0
    """Draft rows without a distribution."""
    gauges: dict[str, float] = field(default_factory=dict)
    """Of the budget; see `BatchBudget.gauges`."""
    rows: list[int] = field(default_factory=list)
    """Verified nodes of each request, in the order of the step's output; for the scheduler."""
    without: dict[str, list[int]] = field(default_factory=dict)
    """Reason -> requests without a tree, by row; for the scheduler."""
    steps: int = 0
    """Requests that have decoded in this step: the scheduler adds it, and what is below."""
    tokens: int = 0
    """What they have emitted."""
    accepted: dict[str, int] = field(default_factory=dict)
    """Nodes, by depth."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Those of them that had no tree, by reason."""

    def stat(self) -> CUDAGraphStat:
        """For `ModelRunnerOutput.cudagraph_stats`."""
        return CUDAGraphStat(0, 0, 0, runtime_mode=json.dumps({KEY: vars(self)}))

    @classmethod
    def of(cls, stat: CUDAGraphStat) -> Self:
        """What `stat` gave."""
        found: Any = json.loads(stat.runtime_mode)[KEY]
        return cls(**found)


def by_depth(depths: Iterable[int]) -> dict[str, int]:
    return {str(depth): count for depth, count in Counter(depths).items()}
