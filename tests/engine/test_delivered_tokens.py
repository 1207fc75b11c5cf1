"""Metrics of requests that end inside an accepted path: they count the delivered tokens. On both runners."""

from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engines import PROMPTS, Engines, TreeSpy, generate, metric, tree
from tests.engine.figures import check_figures

TOKENS = 24


def stopping(plain: list[Any]) -> list[SamplingParams]:
    """Of requests that end at a stop token or at `max_tokens`, at many places of their texts `plain`."""
    found = []
    for index, one in enumerate(plain):
        size = 2 + index % 7
        stops = {"stop_token_ids": [one.token_ids[size]]} if index % 2 else {"max_tokens": size}
        found.append(SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, **stops}))
    return found


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    return generate(engines.start(), PROMPTS, SamplingParams(temperature=0, ignore_eos=True, max_tokens=TOKENS))


def test_requests_that_end_inside_a_path(engines: Engines, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engines.start(tree(12, threshold=0), per_request_spec_decode_metrics="detailed")
    spy = TreeSpy(llm, monkeypatch)
    outputs = generate(llm, PROMPTS, stopping(plain))
    assert all(len(one.token_ids) < TOKENS for one in outputs)
    assert {one.finish_reason for one in outputs} == {"stop", "length"}
    check_figures(llm, outputs, nodes=sum(map(len, spy.trees)))
    for one in outputs:
        steps = one.spec_decode_metrics.to_dict()
        assert steps["num_accepted_draft_tokens"] + steps["num_spec_steps"] <= len(one.token_ids) - 1

    before = metric(llm, "generation_tokens"), metric(llm, "adaptive_tree_decode_tokens")
    stop = plain[0].text[6:9]
    (one,) = generate(llm, PROMPTS[:1], SamplingParams(temperature=0, ignore_eos=True, max_tokens=TOKENS, stop=stop))
    assert one.stop_reason == stop
    engine, decoded = (
        metric(llm, "generation_tokens") - before[0],
        metric(llm, "adaptive_tree_decode_tokens") - before[1],
    )
    assert decoded == engine - 1 >= len(one.token_ids) - 1, "the front end finds stop strings, behind the engine"
