"""Greedy and seeded outputs are those of vLLM without speculation, token by token."""

import importlib
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engines import PROMPTS, V2, Engines, TreeSpy, assert_identical, generate, metric, runner_of, tree

LENGTHS = [24 + 5 * (i % 9) for i in range(len(PROMPTS))]  # requests finish in the middle of the others


def greedy(**extra: Any) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **extra) for n in LENGTHS]


def mixed(**extra: Any) -> list[SamplingParams]:
    """Greedy and seeded requests with unequal parameters in one batch."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_k": 20, "top_p": 0.95},
        {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "min_tokens": 9},
    ]
    return [SamplingParams(max_tokens=n, **kinds[i % 4], **extra) for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def plain(engines: Engines) -> dict[str, list[Any]]:
    llm = engines.start()
    return {
        "greedy": generate(llm, PROMPTS, greedy(logprobs=2)),
        "mixed": generate(llm, PROMPTS, mixed(logprobs=2)),
    }


@pytest.mark.parametrize("nodes", [1, 12, 120, *(pytest.param(nodes, marks=pytest.mark.slow) for nodes in (4, 25, 60))])
def test_greedy_batch_of_1_and_16(engines: Engines, plain: dict[str, list[Any]], nodes: int, monkeypatch: Any) -> None:
    llm = engines.start(tree(nodes))
    spy = TreeSpy(llm, monkeypatch)
    assert_identical(plain["greedy"], generate(llm, PROMPTS, greedy()))
    assert metric(llm, "spec_decode_num_accepted_tokens") > 0
    assert max(len(t) for t in spy.trees) == nodes
    if nodes >= 12:
        assert any(len({t.parents for t in batch}) > 8 for batch in spy.batches), "trees of one batch are too alike"
    for prompt, params, expected in list(zip(PROMPTS, greedy(), plain["greedy"], strict=True))[:2]:
        assert_identical([expected], generate(llm, [prompt], params))


def test_seeded_sampling_and_negative_control(
    engines: Engines, plain: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines.start(tree(25, threshold=0.2))
    assert_identical(plain["mixed"], generate(llm, PROMPTS, mixed()))
    logprobs = generate(llm, PROMPTS, mixed(logprobs=2))
    for ours, theirs in zip(logprobs, plain["mixed"], strict=True):
        for here, there in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert here.keys() == there.keys()
            assert all(abs(here[t].logprob - there[t].logprob) < 1e-4 for t in here)

    llm.reset_prefix_cache()
    verification = importlib.import_module(f"vllm_adaptive_tree.engine.{'v2' if V2 else 'v1'}.verification")
    monkeypatch.setattr(verification.Verification, "commit", lambda *_: None)
    with pytest.raises(AssertionError, match="differs at token|ends elsewhere"):
        assert_identical(plain["greedy"], generate(llm, PROMPTS, greedy()))


@pytest.mark.skipif(V2, reason="of the V1 adapter")
def test_a_chain_shaped_tree_takes_the_native_kernel(
    engines: Engines, plain: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines.start(tree(4, draft_temperature=0.05, threshold=0))
    runner = runner_of(llm)
    spy = TreeSpy(llm, monkeypatch)
    branching = []
    original = runner._build_attention_metadata

    def build(*args: Any, **kwargs: Any) -> Any:
        metadata, common = original(*args, **kwargs)
        verification = runner.step.verification
        if verification is not None and not verification.branching:
            branching.append({type(m).__name__ for m in metadata.values()})
        return metadata, common

    monkeypatch.setattr(runner, "_build_attention_metadata", build)
    assert_identical(plain["greedy"][:1], generate(llm, PROMPTS[:1], greedy()[0]))
    assert any(t.is_chain and len(t) > 1 for t in spy.trees)
    assert set.union(*branching) == {"CPUAttentionMetadata"}
