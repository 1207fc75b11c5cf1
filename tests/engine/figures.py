"""Consistency of the metrics of a run, with each other and with its requests' outputs."""

from collections import Counter
from typing import Any

from tests.engine.engines import metric

MOST = 12
"""Most nodes of a tree."""


def by_label(llm: Any, name: str, label: str) -> dict[str, Any]:
    return {m.labels[label]: m for m in llm.get_metrics() if m.name == f"vllm:{name}"}


def counts(llm: Any, name: str, label: str) -> dict[str, float]:
    return {value: found.value for value, found in by_label(llm, name, label).items()}


def _histogram(sizes: list[int]) -> list[int]:
    found = Counter(sizes)
    return [found[size] for size in range(MOST + 1)]


def check_figures(llm: Any, outputs: list[Any], *, nodes: int) -> dict[str, float]:
    """Check the metrics. `outputs`: all completions of the engine, with `per_request_spec_decode_metrics="detailed"`;
    `nodes`: verified in its steps. Returns the fallbacks by reason."""
    fallbacks = counts(llm, "adaptive_tree_fallbacks", "reason")
    steps, tokens = metric(llm, "adaptive_tree_decode_steps"), metric(llm, "adaptive_tree_decode_tokens")
    drafts = metric(llm, "spec_decode_num_drafts")
    assert drafts == steps - sum(fallbacks.values()) > 0
    drafted = metric(llm, "spec_decode_num_draft_tokens")
    ahead = llm.llm_engine.vllm_config.scheduler_config.async_scheduling  # steps of requests that have ended meanwhile
    assert 0 < nodes - MOST * len(outputs) * ahead <= drafted <= nodes

    requests = [one.spec_decode_metrics for one in outputs]
    assert (
        sum(len(one.per_step_drafted) for one in requests) == sum(map(sum, (r.histogram for r in requests))) == drafts
    )
    assert (
        sum(sum(one.per_step_drafted) for one in requests) == sum(one.num_draft_tokens for one in requests) == drafted
    )
    assert all(size > 0 for one in requests for size in one.per_step_drafted)

    positions = next(m for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens_per_pos")
    accepted = {str(depth): count for depth, count in enumerate(positions.values, start=1) if count}
    assert counts(llm, "adaptive_tree_accepted_nodes", "depth") == accepted
    assert tokens == steps + sum(accepted.values())
    # The first token of a request is of its prompt's step.
    assert tokens == sum(len(one.token_ids) - 1 for one in outputs) == metric(llm, "generation_tokens") - len(outputs)
    histograms = [one.histogram for one in requests]
    assert all(one.histogram == _histogram(one.per_step_accepted) for one in requests)
    assert sum(size * count for one in histograms for size, count in enumerate(one)) == sum(accepted.values())
    return fallbacks
