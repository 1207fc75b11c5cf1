"""Figures of a step, sent from the worker through the scheduler to the front end.

They travel as text in `cudagraph_stats`: the scheduler passes it on from `ModelRunnerOutput` to `SchedulerStats`
unread, and vLLM's own readers look at it only with `cudagraph_metrics`, which a tree method refuses. So a front end
without our patches ignores them. Between processes vLLM decodes the field by its types; text can hold everything.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from vllm.compilation.cuda_graph import CUDAGraphStat

if TYPE_CHECKING:  # a front end needs no budget, nor the loops that it compiles
    from vllm_adaptive_tree.engine.common.batch_budget import BatchBudget

KEY = "adaptive_tree"

BUDGET, DRAFT, SCHEDULER, REQUEST, GRAMMAR, CHECK = "budget", "draft", "scheduler", "request", "grammar", "check"
REASONS = {
    BUDGET: "the budget let the draft rest, or verified none of the nodes",
    DRAFT: "the draft proposed nothing: no continuation, no distribution, no room, or tokens left to read",
    SCHEDULER: "the scheduler kept none of the nodes",
    REQUEST: "the request has asked for none",
    GRAMMAR: "the request's grammar has failed on a tree, and it decodes on without trees",
    CHECK: "the start-up check has switched trees off",
}
"""Reasons why a request decodes a step without a tree."""


@dataclass
class StepFigures:
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, since the last step."""
    nodes: dict[str, int] = field(default_factory=dict)
    """Verified nodes, by depth."""
    drafted: int = 0
    """Nodes of the trees that were drafted, before any cut."""
    expected: float = 0.0
    """Verified nodes that the budget expected to be accepted."""
    observed: float = 0.0
    """Verified nodes that were accepted, also past a stop token: the target would have accepted them."""
    dead: int = 0
    """Draft rows without a distribution."""
    gauges: dict[str, float] = field(default_factory=dict)
    """Gauges of the budget; see `BatchBudget.gauges`."""
    has_lookup_trees: bool = False
    """True if look-ups alone have made the trees while the draft rested; for the scheduler."""
    rows: list[int] = field(default_factory=list)
    """Verified nodes of each request, in the order of the step's output; for the scheduler."""
    fallback_reasons: list[str] = field(default_factory=list)
    """Reason of each request without a tree, "" of the others, in the order of the step's output; for the
    scheduler."""
    steps: int = 0
    """Requests that have decoded in this step; this and the fields below are added by the scheduler."""
    tokens: int = 0
    """Tokens delivered to these requests, up to a stop."""
    accepted: dict[str, int] = field(default_factory=dict)
    """Accepted nodes delivered to these requests, by depth."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Requests that have decoded without a tree, by reason."""
    asked: dict[str, int] = field(default_factory=dict)
    """Requests that have begun to decode, by what they ask of their trees."""

    @classmethod
    def begun(cls, budget: "BatchBudget | None", *, dead: int) -> Self:
        """Figures that are known before the tokens of a step are read, for both model runners: those of its budget, and
        the `dead` rows since the last step."""
        if budget is None:
            return cls(dead=dead)
        expected, observed = budget.budget.take()
        return cls(expected=expected, observed=observed, dead=dead, gauges=budget.gauges)

    def stat(self) -> CUDAGraphStat:
        """Value for `ModelRunnerOutput.cudagraph_stats`."""
        fields = {name: value for name, value in vars(self).items() if value}
        return CUDAGraphStat(0, 0, 0, runtime_mode=json.dumps({KEY: fields}))

    @classmethod
    def of(cls, stat: CUDAGraphStat) -> Self:
        """Figures that `stat` has packed."""
        fields: Any = json.loads(stat.runtime_mode)[KEY]
        return cls(**fields)


def by_depth(depths: Iterable[int]) -> dict[str, int]:
    return {str(depth): count for depth, count in Counter(depths).items()}
