"""Metrics of trees in `LLM.get_metrics()` and `/metrics`, checked against the trees that the runner verified."""

from collections import Counter
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engines import PROMPTS, V2, Engines, TreeSpy, generate, metric, runner_of, set_costs, tree
from tests.engine.figures import by_label, check_figures, counts
from vllm_adaptive_tree.budget import Plan

pytestmark = pytest.mark.skipif(V2, reason="of the V1 adapter; test_v2_step.py has the other's")

PHASES = {"verify", "accept", "commit", "draft", "tree"}


def test_figures_of_a_run(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engines.start(tree(12, threshold=0), per_request_spec_decode_metrics="detailed")
    before = by_label(llm, "adaptive_tree_nodes", "depth")
    assert not before, "counters start empty with a new engine"
    spy = TreeSpy(llm, monkeypatch)
    sampled: dict[str, list[int]] = {}
    original = runner_of(llm)._sample

    def sample(logits: Any, metadata: Any) -> Any:
        output = original(logits, metadata)
        names = runner_of(llm).input_batch.req_ids
        for name, row in zip(names, output.sampled_token_ids.tolist(), strict=True):
            sampled.setdefault(name, []).append(sum(token >= 0 for token in row))
        return output

    monkeypatch.setattr(runner_of(llm), "_sample", sample)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    long = PROMPTS[2] * 20
    outputs = generate(llm, [*PROMPTS[:8], long], params)
    outputs += generate(llm, [long, PROMPTS[0]], params)  # the prompt is in the prefix cache: vLLM would pad it with -1

    depths = Counter(depth for tree in spy.trees for depth in tree.depths)
    assert depths
    nodes = by_label(llm, "adaptive_tree_nodes", "depth")
    assert {int(depth): m.value for depth, m in nodes.items()} == depths
    fallbacks = check_figures(llm, outputs, nodes=depths.total())
    assert sum(fallbacks.values()) == fallbacks.get("draft", 0) < 9, "where it has to read a long prompt first"
    accepted: Counter[str] = Counter()
    for one, sizes in zip(outputs, sampled.values(), strict=True):
        sizes[-1] -= sum(sizes) - len(one.token_ids)  # the last path may go on behind the end
        accepted.update(str(depth) for size in sizes for depth in range(1, size))
    assert counts(llm, "adaptive_tree_accepted_nodes", "depth") == accepted
    assert metric(llm, "adaptive_tree_drafted_nodes") >= depths.total()

    seconds = by_label(llm, "adaptive_tree_phase_seconds", "phase")
    assert set(seconds) == PHASES
    assert all(m.sum > 0 for m in seconds.values())
    assert seconds["verify"].count == len(spy.batches)
    assert metric(llm, "adaptive_tree_expected_tokens") == metric(llm, "adaptive_tree_observed_tokens") == 0


def test_steps_without_a_tree(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of three rest."""
    set_costs(monkeypatch, verify={"rows": [1, 1000], "seconds": [0.1, 0.1]})
    llm = engines.start(tree(12, budget="auto"), per_request_spec_decode_metrics="detailed")
    budget, steps = runner_of(llm).budget.budget, 0

    def begin(greedy: Any) -> Plan:
        nonlocal steps
        steps += 1
        budget.plan = Plan(0 if steps % 3 else 4, 7.0)
        return budget.plan

    monkeypatch.setattr(budget, "begin", begin)
    spy = TreeSpy(llm, monkeypatch)
    outputs = generate(llm, PROMPTS[:8], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    fallbacks = check_figures(llm, outputs, nodes=sum(map(len, spy.trees)))
    assert set(fallbacks) <= {"budget", "draft"}, "the prompts, or a path with a low chance at its end"
    assert fallbacks["budget"] > 10 * fallbacks.get("draft", 0)
    assert 1.5 < fallbacks["budget"] / metric(llm, "spec_decode_num_drafts") < 2.5
    assert metric(llm, "adaptive_tree_draft_levels") in (0, 4)
    assert metric(llm, "adaptive_tree_price_tokens_per_second") == 7


def test_no_room_for_nodes(engines: Engines) -> None:
    """Behind the end of the context vLLM schedules no node."""
    llm = engines.start(tree(12, threshold=0), max_model_len=64)
    generate(llm, PROMPTS[:1], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert set(counts(llm, "adaptive_tree_fallbacks", "reason")) <= {"scheduler", "draft"}
    assert metric(llm, "adaptive_tree_decode_steps") > metric(llm, "spec_decode_num_drafts") > 0


def test_what_a_budget_expects_comes_true(engines: Engines) -> None:
    llm = engines.start(tree(12, budget=40))
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    generate(llm, PROMPTS, params)
    assert metric(llm, "adaptive_tree_budget_nodes") <= 40
    assert not [m for m in llm.get_metrics() if m.name == "vllm:adaptive_tree_price_tokens_per_second"]
    names = ("adaptive_tree_expected_tokens", "adaptive_tree_observed_tokens")
    expected, observed = (metric(llm, name) for name in names)
    delivered = metric(llm, "spec_decode_num_accepted_tokens")
    assert 100 < delivered <= observed < 1.1 * delivered  # what is past a stop was accepted, too
    assert 0.8 < expected / observed < 1.25


def test_no_figures_without_a_tree(engines: Engines) -> None:
    llm = engines.start()
    generate(llm, PROMPTS[:2], SamplingParams(max_tokens=3))
    assert not [m for m in llm.get_metrics() if "adaptive_tree" in m.name]
