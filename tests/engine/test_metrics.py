"""What `LLM.get_metrics()` and `/metrics` say about a tree: checked against the trees that the runner verified."""

from collections import Counter
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engines import PROMPTS, V2, Engines, TreeSpy, generate, metric, runner_of, tree

pytestmark = pytest.mark.skipif(V2, reason="of the V1 adapter; test_v2_step.py has the other's")

PHASES = {"verify", "accept", "commit", "draft", "tree"}


def by_label(llm: Any, name: str, label: str) -> dict[str, Any]:
    return {m.labels[label]: m for m in llm.get_metrics() if m.name == f"vllm:{name}"}


def test_figures_of_a_run(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engines.start(tree(12, threshold=0))
    before = by_label(llm, "adaptive_tree_nodes", "depth")
    assert not before, "counters start empty with a new engine"
    spy = TreeSpy(llm, monkeypatch)
    accepted_depths: Counter[int] = Counter()
    original = runner_of(llm)._sample

    def sample(logits: Any, metadata: Any) -> Any:
        output = original(logits, metadata)
        for row in output.sampled_token_ids.tolist():
            accepted_depths.update(range(1, sum(token >= 0 for token in row)))
        return output

    monkeypatch.setattr(runner_of(llm), "_sample", sample)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    long = PROMPTS[2] * 20
    generate(llm, [*PROMPTS[:8], long], params)
    generate(llm, [long, PROMPTS[0]], params)  # the prompt is in the prefix cache: vLLM would pad it with -1

    depths = Counter(depth for tree in spy.trees for depth in tree.depths)
    assert depths
    nodes = by_label(llm, "adaptive_tree_nodes", "depth")
    assert {int(depth): m.value for depth, m in nodes.items()} == depths
    assert metric(llm, "spec_decode_num_draft_tokens") == depths.total()

    positions = next(m for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens_per_pos")
    assert {depth: count for depth, count in enumerate(positions.values, start=1) if count} == accepted_depths

    seconds = by_label(llm, "adaptive_tree_phase_seconds", "phase")
    assert set(seconds) == PHASES
    assert all(m.sum > 0 for m in seconds.values())
    assert seconds["verify"].count == len(spy.batches)
    assert metric(llm, "adaptive_tree_expected_tokens") == metric(llm, "adaptive_tree_observed_tokens") == 0


def test_what_a_budget_expects_comes_true(engines: Engines) -> None:
    llm = engines.start(tree(12, budget=40))
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    generate(llm, PROMPTS, params)
    names = ("adaptive_tree_expected_tokens", "adaptive_tree_observed_tokens")
    expected, observed = (metric(llm, name) for name in names)
    assert observed == metric(llm, "spec_decode_num_accepted_tokens") > 100
    assert 0.8 < expected / observed < 1.25


def test_no_figures_without_a_tree(engines: Engines) -> None:
    llm = engines.start()
    generate(llm, PROMPTS[:2], SamplingParams(max_tokens=3))
    assert not [m for m in llm.get_metrics() if "adaptive_tree" in m.name]
