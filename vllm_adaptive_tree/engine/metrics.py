"""Figures of every step, from the worker to `/metrics` and `LLM.get_metrics()`.

They travel in vLLM's slot for encoder-cache connectors, which a tree method refuses anyway: the scheduler passes that
slot's `data` from `ModelRunnerOutput` to `SchedulerStats` without looking into it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import Counter as PromCounter
from prometheus_client import Histogram
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.v1.outputs import ECConnectorOutput

KEY = "adaptive_tree"
SECONDS = "vllm:adaptive_tree_phase_seconds"
NODES = "vllm:adaptive_tree_nodes"
EXPECTED = "vllm:adaptive_tree_expected_tokens"
OBSERVED = "vllm:adaptive_tree_observed_tokens"
DEAD = "vllm:adaptive_tree_dead_draft_rows"
BUCKETS = [0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]


def step_figures(
    seconds: Mapping[str, float], depths: Iterable[int], expected: float, observed: float, *, dead: int
) -> ECConnectorOutput:
    """`seconds` of every phase since the last call, how many nodes of each of the `depths` were verified, how many of
    them the budget expected to be accepted and saw accepted, and how many rows of the draft were `dead`."""
    nodes = {str(depth): count for depth, count in Counter(depths).items()}
    figures = {"seconds": dict(seconds), "nodes": nodes, "expected": expected, "observed": observed, "dead": dead}
    return ECConnectorOutput(ec_connector_stats=ECConnectorStats({KEY: figures}))


class TreeProm(ECConnectorPromMetrics):
    """The Prometheus side, in the front end: a histogram of seconds per phase and counters of nodes."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self.seconds = metric_types[Histogram](
            name=SECONDS,
            documentation="Seconds of a step in each phase of tree speculative decoding.",
            labelnames=[*labelnames, "phase"],
            buckets=BUCKETS,
        )
        self.nodes = metric_types[PromCounter](
            name=NODES,
            documentation="Draft nodes verified, by depth in the tree (1: below the root).",
            labelnames=[*labelnames, "depth"],
        )
        self.expected, self.observed, self.dead = (
            metric_types[PromCounter](name=name, documentation=what, labelnames=labelnames)
            for name, what in (
                (EXPECTED, "Verified draft nodes that the budget expected to be accepted, where there is a budget."),
                (OBSERVED, "Those that were accepted, where there is a budget."),
                (
                    DEAD,
                    "Rows of draft logits that give no law (NaN, +Inf, or -Inf throughout); nothing is drafted there.",
                ),
            )
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        figures = transfer_stats_data[KEY]
        for phase, seconds in figures["seconds"].items():
            self.seconds.labels(*labels, phase).observe(seconds)
        for depth, count in figures["nodes"].items():
            self.nodes.labels(*labels, depth).inc(count)
        self.expected.labels(*labels).inc(figures["expected"])
        self.observed.labels(*labels).inc(figures["observed"])
        self.dead.labels(*labels).inc(figures["dead"])
