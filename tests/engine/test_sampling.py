"""Every sampling parameter: the tokens are those of vLLM without speculation, seeded and greedy in one batch."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.engine.engines import DRAFT, PROMPTS, Engines, TreeSpy, assert_identical, generate, tree

KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.9},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "generation_config": {"top_k": 20, "top_p": 0.95},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.9},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "bad_words": {"bad_words": ["the", " self", "import"]},
    "min_tokens": {"min_tokens": 17, "ignore_eos": False, "stop_token_ids": list(range(260, 500))},
    "logit_bias": {"logit_bias": {262: 12.0, 300: -100.0, 201: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(3, 900))},
    "stop": {"stop": ["e", "self"], "min_tokens": 3},
    "stop_token_ids": {"stop_token_ids": list(range(260, 320))},
    "logprobs": {"logprobs": 4},
    "all": {"min_p": 0.02, "top_k": 40, "repetition_penalty": 1.1, "logit_bias": {262: 1.0}, "min_tokens": 5},
}


def batch(kind: dict[str, Any], **extra: Any) -> list[SamplingParams]:
    """Four requests with the parameter, greedy and seeded in turn, and two without."""
    params = []
    for i in range(6):
        own = kind if i < 4 else {}
        law = {"temperature": 0 if i % 2 else 1.0, "seed": 100 + i}
        params.append(SamplingParams(**{"max_tokens": 40 + i, "ignore_eos": True, **law, **own, **extra}))
    return params


@pytest.fixture(scope="module")
def plain(engines: Engines) -> dict[str, list[Any]]:
    llm = engines.start()
    found = {"none": generate(llm, PROMPTS[:6], batch({}, logprobs=2))}
    for name, kind in KINDS.items():
        found[name] = generate(llm, PROMPTS[:6], batch(kind, logprobs=kind.get("logprobs", 2)))
    params = SamplingParams(temperature=0.8, seed=7, n=3, max_tokens=30, ignore_eos=True)
    found["n"] = [c for o in llm.generate(PROMPTS[:4], params, use_tqdm=False) for c in o.outputs]
    found["prompt_logprobs"] = llm.generate(PROMPTS[:3], SamplingParams(max_tokens=4, prompt_logprobs=3, seed=1))
    return found


@pytest.fixture(scope="module")
def llm(engines: Engines, plain: dict[str, list[Any]]) -> Any:
    return engines.start(tree(12, threshold=0.2))


@pytest.mark.parametrize("name", KINDS)
def test_parameter(llm: Any, plain: dict[str, list[Any]], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = TreeSpy(llm, monkeypatch)
    changed = [list(a.token_ids) != list(b.token_ids) for a, b in zip(plain[name], plain["none"], strict=True)]
    assert name == "logprobs" or any(changed), "a parameter without effect proves nothing"
    assert_identical(plain[name], generate(llm, PROMPTS[:6], batch(KINDS[name])))
    assert any(not t.is_chain for t in spy.trees)


def test_n(llm: Any, plain: dict[str, list[Any]]) -> None:
    params = SamplingParams(temperature=0.8, seed=7, n=3, max_tokens=30, ignore_eos=True)
    ours = [c for o in llm.generate(PROMPTS[:4], params, use_tqdm=False) for c in o.outputs]
    assert [list(c.token_ids) for c in ours] == [list(c.token_ids) for c in plain["n"]]
    assert len({tuple(c.token_ids) for c in ours}) > 4


@pytest.mark.parametrize("name", ["logprobs", "repetition_penalty", "min_tokens"])
def test_logprobs(llm: Any, plain: dict[str, list[Any]], name: str) -> None:
    count = 4 if name == "logprobs" else 2
    for ours, theirs in zip(generate(llm, PROMPTS[:6], batch(KINDS[name], logprobs=count)), plain[name], strict=True):
        assert len(ours.logprobs) == len(ours.token_ids)
        for here, there in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert here.keys() == there.keys()
            assert all(abs(here[t].logprob - there[t].logprob) < 1e-4 for t in here)
            assert all(here[t].rank == there[t].rank for t in here)


def test_prompt_logprobs(llm: Any, plain: dict[str, list[Any]]) -> None:
    params = SamplingParams(max_tokens=4, prompt_logprobs=3, seed=1)
    for ours, theirs in zip(llm.generate(PROMPTS[:3], params), plain["prompt_logprobs"], strict=True):
        for here, there in zip(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], strict=True):
            assert here.keys() == there.keys()
            assert all(abs(here[t].logprob - there[t].logprob) < 1e-4 for t in here)


def test_vllm_s_own_chain_still_refuses(engines: Engines, llm: Any) -> None:
    chain = engines.start({"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3})
    for refused in ({"min_p": 0.1}, {"logit_bias": {3: 1.0}}):
        with pytest.raises(VLLMValidationError, match="not yet supported with speculative"):
            generate(chain, PROMPTS[:1], SamplingParams(**refused))
