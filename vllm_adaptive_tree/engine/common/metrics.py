"""Statistics of every step, from the worker to `/metrics` and `LLM.get_metrics()`.

They travel as text in `cudagraph_stats`: the scheduler passes it on from `ModelRunnerOutput` to `SchedulerStats`
unread, and vLLM's own readers look at it only with `cudagraph_metrics`, which a tree method refuses. So a front end
without our patches ignores them. Between processes vLLM decodes the slot by its types; text holds everything.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import Counter as PromCounter
from prometheus_client import Histogram
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")

KEY = "adaptive_tree"
SECONDS = "vllm:adaptive_tree_phase_seconds"
NODES = "vllm:adaptive_tree_nodes"
COUNTERS = {  # key of the statistics -> metric, description
    "expected": (
        "vllm:adaptive_tree_expected_tokens",
        "Verified draft nodes that the budget expected to be accepted, if there is a budget.",
    ),
    "observed": ("vllm:adaptive_tree_observed_tokens", "Those that were accepted, if there is a budget."),
    "dead": (
        "vllm:adaptive_tree_dead_draft_rows",
        "Rows of draft logits that give no distribution (NaN, +Inf, or all -Inf); nothing is drafted there.",
    ),
}
BUCKETS = [0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
LABELS = ["model_name", "engine"]
"""Of every metric of `PrometheusStatLogger`, which keeps only their values."""


def step_stats(
    seconds: Mapping[str, float], depths: Iterable[int], expected: float, observed: float, *, dead: int
) -> CUDAGraphStat:
    """For `ModelRunnerOutput.cudagraph_stats`.

    Args:
        seconds: of every phase since the last call.
        depths: of the verified nodes.
        expected, observed: nodes that the budget expected to be accepted, and those that were.
        dead: draft rows without a distribution.
    """
    nodes = {str(depth): count for depth, count in Counter(depths).items()}
    stats = {"seconds": dict(seconds), "nodes": nodes, "expected": expected, "observed": observed, "dead": dead}
    return CUDAGraphStat(0, 0, 0, runtime_mode=json.dumps({KEY: stats}))


class TreeProm:
    """The Prometheus side, in the front end: a histogram of seconds per phase and counters of nodes."""

    def __init__(
        self, metric_types: Mapping[Any, Any], labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ):
        self.per_engine_labelvalues = per_engine_labelvalues
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
        self.counters = {
            key: metric_types[PromCounter](name=name, documentation=what, labelnames=labelnames)
            for key, (name, what) in COUNTERS.items()
        }

    def observe(self, stat: CUDAGraphStat, engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        stats = json.loads(stat.runtime_mode)[KEY]
        for phase, seconds in stats["seconds"].items():
            self.seconds.labels(*labels, phase).observe(seconds)
        for depth, count in stats["nodes"].items():
            self.nodes.labels(*labels, depth).inc(count)
        for key, counter in self.counters.items():
            counter.labels(*labels).inc(stats[key])


def add_tree_metrics(stat_logger: Any) -> None:
    """Add our metrics to a `PrometheusStatLogger`, of its own classes: Ray's logger has Ray's."""
    types = {PromCounter: stat_logger._counter_cls, Histogram: stat_logger._histogram_cls}
    stat_logger.tree_prom = TreeProm(types, LABELS, stat_logger.per_engine_labelvalues)


def record_tree_metrics(stat_logger: Any, scheduler_stats: Any, engine_idx: int) -> None:
    """Record a step's statistics, if it has any. An exception here would end the server, so after one these metrics
    stop with a warning."""
    prom = getattr(stat_logger, "tree_prom", None)
    if prom is None or scheduler_stats is None or scheduler_stats.cudagraph_stats is None:
        return
    try:
        prom.observe(scheduler_stats.cudagraph_stats, engine_idx)
    except Exception:
        logger.exception("The statistics of a step cannot be read; vllm:adaptive_tree_* stay as they are from here on")
        stat_logger.tree_prom = None
