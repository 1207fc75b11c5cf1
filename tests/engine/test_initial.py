"""MCSD with more than one initial token: not lossless, but every token is one that the target offered."""

import re
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.engines import DRAFT, PROMPTS, Engines, TreeSpy, generate, metric

WIDTH = 3
SPEC = {
    "method": "mcsd",
    "model": DRAFT,
    "num_speculative_tokens": 45,
    "tree": {"budget": None, "init_width": WIDTH, "shape": [3, 2, 1], "allow_lossy": True},
}


CALL = r"[a-z_]{3,12}\(([a-z]{1,8}, )*[a-z]{1,8}\)"


def parameters(i: int) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": 20 + 2 * i, "ignore_eos": True, "logprobs": 0}
    if i % 4 == 1:
        return SamplingParams(temperature=0.9, top_k=4, **common)
    if i % 4 == 3:
        return SamplingParams(temperature=0.9, top_k=4, seed=i, **common)
    return SamplingParams(temperature=0, repetition_penalty=1.2 if i == 4 else 1, **common)


@pytest.fixture(scope="module")
def ours(engines: Engines) -> list[Any]:
    llm = engines.start(SPEC)
    with pytest.MonkeyPatch.context() as patch:
        spy = TreeSpy(llm, patch)
        outputs = llm.generate(PROMPTS[:12], [parameters(i) for i in range(12)], use_tqdm=False)
        structured = SamplingParams(max_tokens=60, seed=1, structured_outputs=StructuredOutputsParams(regex=CALL))
        calls = generate(llm, PROMPTS[:4], structured)
        assert all(re.fullmatch(CALL, call.text) for call in calls if call.finish_reason == "stop")
        assert any(call.finish_reason == "stop" for call in calls)
        assert metric(llm, "spec_decode_num_accepted_tokens") > 0
        assert {sum(parent < 0 for parent in tree.parents) for tree in spy.trees} >= {WIDTH}
    return outputs


def test_every_token_is_one_that_the_target_offered(engines: Engines, ours: list[Any]) -> None:
    """The step's tokens stand in the cache as if decoded one by one: plain vLLM gives them the same logprobs."""
    llm = engines.start()
    other = 0
    for i, output in enumerate(ours):
        mine = output.outputs[0]
        assert len(mine.token_ids) == parameters(i).max_tokens
        entries = [entry[token] for entry, token in zip(mine.logprobs, mine.token_ids, strict=True)]
        tokens = [*output.prompt_token_ids, *mine.token_ids]
        theirs = llm.generate(
            [{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
        )[0].prompt_logprobs
        expected = [entry[token].logprob for entry, token in zip(theirs, tokens, strict=True) if entry]
        assert [entry.logprob for entry in entries] == pytest.approx(expected[-len(entries) :], abs=1e-4)
        if i != 4:
            assert all(entry.rank <= (WIDTH if i % 2 == 0 else 4) for entry in entries)
            other += sum(entry.rank > 1 for entry in entries if i % 2 == 0)
    assert other > 0, "greedy requests never took a second choice: nothing is initialised by the target"


def test_one_initial_token_is_plain_decoding(engines: Engines, ours: list[Any]) -> None:
    greedy = [i for i in range(12) if i % 2 == 0]
    prompts, params = [PROMPTS[i] for i in greedy], [parameters(i) for i in greedy]
    expected = [output.token_ids for output in generate(engines.start(), prompts, params)]
    tree = {"budget": None, "shape": [WIDTH, 3, 2, 1]}
    found = [output.token_ids for output in generate(engines.start({**SPEC, "tree": tree}), prompts, params)]
    assert found == expected
    assert [ours[i].outputs[0].token_ids for i in greedy] != expected
