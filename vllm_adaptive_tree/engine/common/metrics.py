"""Figures of every step, from the worker to `/metrics` and `LLM.get_metrics()`.

They travel in `cudagraph_stats`, which the scheduler hands on from `ModelRunnerOutput` to `SchedulerStats` unread, and
at which no reader of vLLM's looks without `cudagraph_metrics`; a tree method refuses that. So a front end without our
patches ignores them. Between processes vLLM decodes the slot by its types, and text is the one that takes everything.
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
EXPECTED = "vllm:adaptive_tree_expected_tokens"
OBSERVED = "vllm:adaptive_tree_observed_tokens"
DEAD = "vllm:adaptive_tree_dead_draft_rows"
BUCKETS = [0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
LABELS = ["model_name", "engine"]
"""Of every metric of `PrometheusStatLogger`; it keeps their values, and not their names."""


def step_stats(
    seconds: Mapping[str, float], depths: Iterable[int], expected: float, observed: float, *, dead: int
) -> CUDAGraphStat:
    """For `ModelRunnerOutput.cudagraph_stats`: `seconds` of every phase since the last call, how many nodes of each of
    the `depths` were verified, how many of them the budget expected to be accepted and saw accepted, and how many rows
    of the draft were `dead`."""
    nodes = {str(depth): count for depth, count in Counter(depths).items()}
    figures = {"seconds": dict(seconds), "nodes": nodes, "expected": expected, "observed": observed, "dead": dead}
    return CUDAGraphStat(0, 0, 0, runtime_mode=json.dumps({KEY: figures}))


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

    def observe(self, stat: CUDAGraphStat, engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        figures = json.loads(stat.runtime_mode)[KEY]
        for phase, seconds in figures["seconds"].items():
            self.seconds.labels(*labels, phase).observe(seconds)
        for depth, count in figures["nodes"].items():
            self.nodes.labels(*labels, depth).inc(count)
        self.expected.labels(*labels).inc(figures["expected"])
        self.observed.labels(*labels).inc(figures["observed"])
        self.dead.labels(*labels).inc(figures["dead"])


def add_tree_metrics(stat_logger: Any) -> None:
    """Give a `PrometheusStatLogger` our metrics too, of its own classes: Ray's logger has Ray's."""
    types = {PromCounter: stat_logger._counter_cls, Histogram: stat_logger._histogram_cls}
    stat_logger.tree_prom = TreeProm(types, LABELS, stat_logger.per_engine_labelvalues)


def record_tree_metrics(stat_logger: Any, scheduler_stats: Any, engine_idx: int) -> None:
    """Record a step's figures, if it has any. An exception here would end the server, so there is a warning, and an end
    of these metrics, instead."""
    prom = getattr(stat_logger, "tree_prom", None)
    if prom is None or scheduler_stats is None or scheduler_stats.cudagraph_stats is None:
        return
    try:
        prom.observe(scheduler_stats.cudagraph_stats, engine_idx)
    except Exception:
        logger.exception("The figures of a step cannot be read; vllm:adaptive_tree_* stay as they are from here on")
        stat_logger.tree_prom = None
