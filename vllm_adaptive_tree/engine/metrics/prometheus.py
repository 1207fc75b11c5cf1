"""Prometheus metrics of every step, at `/metrics` and in `LLM.get_metrics()`, beside vLLM's own."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from vllm.logger import init_logger

from vllm_adaptive_tree.engine.metrics.step_figures import REASONS, StepFigures

logger = init_logger(f"vllm.{__name__}")


class Metric(NamedTuple):
    kind: type[Counter | Gauge | Histogram]
    documentation: str
    label: str | None = None
    """Label besides those of all metrics."""


PREFIX = "vllm:adaptive_tree_"
METRICS = {  # name after the prefix -> metric
    "phase_seconds": Metric(Histogram, "Seconds of a step in each phase of tree speculative decoding.", "phase"),
    "drafted_nodes": Metric(Counter, "Nodes of draft trees, before any cut."),
    "nodes": Metric(Counter, "Draft nodes verified, by depth in the tree (1: below the root).", "depth"),
    "accepted_nodes": Metric(Counter, "Draft nodes accepted and delivered, by depth in the tree.", "depth"),
    "decode_steps": Metric(Counter, "Steps in which a request has decoded, with a tree or without: one per request."),
    "decode_tokens": Metric(Counter, "Tokens that decode steps have emitted, up to a stop."),
    "fallbacks": Metric(
        Counter, "Decode steps without a tree, by reason: " + "; ".join(map(": ".join, REASONS.items())) + ".",
        "reason",
    ),
    "requests": Metric(
        Counter, "Requests with options of their own (extra_args['tree']): off, nodes, chosen, drawn, reproducible.",
        "asked",
    ),
    "expected_tokens": Metric(
        Counter, "Verified draft nodes that the budget expected the target to accept, if there is a budget."
    ),
    "observed_tokens": Metric(
        Counter, "Verified draft nodes that the target accepted, past a stop token too, if there is a budget."
    ),
    "dead_draft_rows": Metric(
        Counter, "Rows of draft logits that give no distribution (NaN, +Inf, or all -Inf); nothing is drafted there."
    ),
    "low_acceptance": Metric(
        Gauge, "1: the target accepts almost no draft nodes; the log and `doctor` name likely causes."
    ),
    "budget_nodes": Metric(Gauge, "Most nodes that the batch may verify in a step."),
    "draft_levels": Metric(Gauge, "Most levels that draft trees may have; 0: the draft rests."),
    "price_tokens_per_second": Metric(Gauge, "Tokens per second that drafting or verifying must bring to pay off."),
}  # fmt: skip
COUNTED = {
    "drafted_nodes": "drafted",
    "decode_steps": "steps",
    "decode_tokens": "tokens",
    "expected_tokens": "expected",
    "observed_tokens": "observed",
    "dead_draft_rows": "dead",
}
COUNTED_BY_LABEL = {"nodes": "nodes", "accepted_nodes": "accepted", "fallbacks": "fallbacks", "requests": "asked"}
"""Metric -> field of `StepFigures`."""
BUCKETS = [0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
LABELS = ["model_name", "engine"]
"""Labels of every metric of `PrometheusStatLogger`, which keeps only their values."""


class TreeProm:
    """Prometheus metrics in the front end."""

    def __init__(self, metric_types: Mapping[Any, Any], per_engine_labelvalues: dict[int, list[object]]):
        """`metric_types`: prometheus_client's classes -> classes of the metrics to make."""
        self.per_engine_labelvalues, self.metrics = per_engine_labelvalues, dict[str, Any]()
        self.labelled: dict[tuple[Any, ...], Any] = {}
        """Metrics with their labels, by engine, name and label."""
        for name, (kind, documentation, label) in METRICS.items():
            labels = LABELS if label is None else [*LABELS, label]
            more: dict[Any, dict[str, Any]] = {
                Histogram: {"buckets": BUCKETS},
                Gauge: {"multiprocess_mode": "mostrecent"},
            }
            self.metrics[name] = metric_types[kind](
                name=PREFIX + name, documentation=documentation, labelnames=labels, **more.get(kind, {})
            )

    def observe(self, figures: StepFigures, engine: int = 0) -> None:
        for phase, seconds in figures.seconds.items():
            self._labelled(engine, "phase_seconds", phase).observe(seconds)
        for name, field in COUNTED_BY_LABEL.items():
            for label, count in getattr(figures, field).items():
                self._labelled(engine, name, label).inc(count)
        for name, field in COUNTED.items():
            self._labelled(engine, name).inc(getattr(figures, field))
        for name, value in figures.gauges.items():
            self._labelled(engine, name).set(value)

    def _labelled(self, *key: Any) -> Any:
        if key not in self.labelled:
            engine, name, *label = key
            self.labelled[key] = self.metrics[name].labels(*self.per_engine_labelvalues[engine], *label)
        return self.labelled[key]


def add_tree_metrics(stat_logger: Any) -> None:
    """Add our metrics to a `PrometheusStatLogger`, of its own classes: Ray's logger has Ray's."""
    types = {
        Counter: stat_logger._counter_cls,
        Gauge: stat_logger._gauge_cls,
        Histogram: stat_logger._histogram_cls,
    }
    stat_logger.tree_prom = TreeProm(types, stat_logger.per_engine_labelvalues)


def record_tree_metrics(stat_logger: Any, scheduler_stats: Any, engine_idx: int) -> None:
    """Record a step's statistics, if it has any. An exception here would end the server; after one, these metrics stop
    with a logged error."""
    prom = getattr(stat_logger, "tree_prom", None)
    if prom is None or scheduler_stats is None or scheduler_stats.cudagraph_stats is None:
        return
    try:
        prom.observe(StepFigures.of(scheduler_stats.cudagraph_stats), engine_idx)
    except Exception:
        logger.exception("The statistics of a step cannot be read; vllm:adaptive_tree_* stay as they are from here on")
        stat_logger.tree_prom = None
