"""Every sampling parameter: the tokens are those of vLLM without speculation, seeded and greedy in one batch."""

import copy
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

from tests.engine.engines import (
    DRAFT,
    PROMPTS,
    TARGET,
    V2,
    Engines,
    TreeSpy,
    assert_identical,
    generate,
    metric,
    tree,
)

ARGUMENTS: dict[str, Any] = {
    "max_logprobs": -1,
    "reasoning_config": {"reasoning_start_str": " the", "reasoning_end_str": ".\n"},  # one token, two tokens
}
CHUNKED = {"max_model_len": 320, "max_num_batched_tokens": 64}
LONG = ["\n\n".join(PROMPTS[i:] + PROMPTS[:i]) for i in range(0, 16, 3)]  # about 240 tokens each

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
    "min_tokens": {"min_tokens": 17, "ignore_eos": False, "stop_token_ids": list(range(260, 380 if V2 else 500))},
    "logit_bias": {"logit_bias": {262: 12.0, 300: -100.0, 201: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(3, 900))},
    "stop": {"stop": ["e", "self"], "min_tokens": 3},
    "stop_token_ids": {"stop_token_ids": list(range(260, 320))},
    "repetition_detection": {"repetition_detection": RepetitionDetectionParams(max_pattern_size=12, min_count=2)},
    "thinking_token_budget": {"thinking_token_budget": 4},
    "thinking_token_budget_0": {"thinking_token_budget": 0},
    "all": {"min_p": 0.02, "top_k": 40, "repetition_penalty": 1.1, "logit_bias": {262: 1.0}, "min_tokens": 5},
}

GREEDY_ALIKE = {"top_k", "top_p", "generation_config", "min_p", "stop_token_ids", "repetition_detection"}
"""Those that make no difference to what a greedy request takes next."""

PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}

WITH_LOGPROBS = "top_k", "bad_words"
"""One that greedy sampling does not heed, and one that it heeds; with logprobs all are drawn level by level."""

LOGPROBS: dict[str, dict[str, Any]] = {
    "top_4": {"logprobs": 4},
    "all": {"logprobs": -1},
    "flat": {"logprobs": 3, "flat_logprobs": True},
    "token_ids": {"logprob_token_ids": [5, 300, 9, 201, 276]},
    "top_2_and_repetition_penalty": {"logprobs": 2, "repetition_penalty": 1.3},
    "top_2_and_min_tokens": {"logprobs": 2, **KINDS["min_tokens"]},
}
SPECIAL = {"allowed_token_ids": [1, 2, 201, 276, 295], "logit_bias": {1: 16.0, 2: 16.0}}  # 1 and 2: special tokens
TEXTS: dict[str, dict[str, Any]] = {
    "special": SPECIAL,
    "detokenize": {**SPECIAL, "detokenize": False},
    "skip_special_tokens": {**SPECIAL, "skip_special_tokens": False},
    "stop": {"stop": ["s"]},
    "include_stop_str_in_output": {"stop": ["s"], "include_stop_str_in_output": True},
}
CHUNKS: dict[str, list[dict[str, Any]]] = {  # by prompt of LONG
    "none": [{}] * 6,
    "prompt_logprobs": [{"prompt_logprobs": 3}, {"prompt_logprobs": 0}, {}] * 2,
    "thinking_token_budget": [{"thinking_token_budget": n} for n in (11, 45, 6, 56, 83, 25)],  # 10 to 82 in the prompt
}
SEEDS: list[dict[str, Any]] = [{"temperature": 1.0, "seed": i} for i in range(6)]
STREAMS: dict[str, dict[str, Any]] = {
    "cumulative": {"output_kind": RequestOutputKind.CUMULATIVE},
    "final_only": {"output_kind": RequestOutputKind.FINAL_ONLY},
    "delta": {"output_kind": RequestOutputKind.DELTA},
    "stream_interval": {"output_kind": RequestOutputKind.DELTA, "stream_interval": 12},
}

REFUSED: dict[str, tuple[Any, str]] = {
    "trace_decode_token_ids": ([5], "not supported with speculative decoding"),
    "prompt_logprob_token_ids": ([[5]], "scored rows" if V2 else "requires the V2 model runner"),
    "prompt_logprob_start": (1, "requires prompt_logprob_token_ids"),
}
REFUSED_AT_START: dict[str, tuple[Any, str]] = {  # without these, other parameters have no effect
    "watermark_config": ({"key": 5}, "Speculative decoding with watermarking"),
    "enable_return_routed_experts": (True, "only supports MoE" if V2 else "requires Model Runner V2"),
}
if not V2:  # there vLLM takes it, and refuses the requests that use it
    REFUSED_AT_START["enable_trace_replay"] = (True, "requires Model Runner V2")
LENGTH = 24
"""Tokens of an output."""


def batch(kind: dict[str, Any], **extra: Any) -> list[SamplingParams]:
    """Four requests with the parameter, greedy and seeded in turn, and two without."""
    params = []
    for i in range(6):
        own = kind if i < 4 else {}
        law = {"temperature": 0 if i % 2 else 1.0, "seed": 100 + i}
        params.append(SamplingParams(**{"max_tokens": LENGTH + i, "ignore_eos": True, **law, **own, **extra}))
    return params


def long(kind: dict[str, Any]) -> SamplingParams:
    """For prompts of LONG, which are always read in full unless `kind` lets the prefix cache answer."""
    common = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2, "skip_reading_prefix_cache": True}
    return SamplingParams(**{"temperature": 0, **common, **kind})


def stream(llm: Any, params: list[SamplingParams]) -> list[list[Any]]:
    """Everything that the engine sends for each of the first prompts."""
    engine = llm.llm_engine
    for i, own in enumerate(params):
        engine.add_request(str(i), PROMPTS[i], own)
    parts: list[list[Any]] = [[] for _ in params]
    while engine.has_unfinished_requests():
        for output in engine.step():
            parts[int(output.request_id)].append(copy.deepcopy(output.outputs[0]))
    return parts


def assert_close(ours: Any, theirs: Any) -> None:
    """Logprobs by position: the same tokens, the same ranks, values within 1e-4. The CPU's stand-in for the kernel
    rounds another way on V2, and swaps improbable tokens that are a millionth apart."""
    most = 100 if V2 else 1 << 30
    assert len(ours) == len(theirs)
    for i in range(len(theirs)):
        here, there = ours[i], theirs[i]
        assert (here is None) == (there is None)
        if there is None:  # the first token of a prompt
            continue
        assert here.keys() == there.keys()
        assert [here[t].logprob for t in there] == pytest.approx([there[t].logprob for t in there], abs=1e-4, rel=0)
        assert all(here[t].rank == there[t].rank for t in there if there[t].rank <= most)


@pytest.fixture(scope="module")
def plain(engines: Engines) -> dict[str, Any]:
    chunked = engines.start(**ARGUMENTS, **CHUNKED)
    found: dict[str, Any] = {
        f"chunked {name}": chunked.generate(LONG, [long(kind) for kind in kinds], use_tqdm=False)
        for name, kinds in CHUNKS.items()
    }
    llm = engines.start(**ARGUMENTS)
    found["none"] = generate(llm, PROMPTS[:6], batch({}, logprobs=2))
    for name, kind in KINDS.items():
        found[name] = generate(llm, PROMPTS[:6], batch(kind, logprobs=2))
        # vLLM hands a finished request's thinking budget on to a request without one that moves into its row.
        found[name][4:] = found["none"][4:]
    found["logprobs"] = {name: generate(llm, PROMPTS[:6], batch(kind)) for name, kind in LOGPROBS.items()}
    found["texts"] = {name: generate(llm, PROMPTS[:6], batch(kind)) for name, kind in TEXTS.items()}
    params = SamplingParams(temperature=0.8, seed=7, n=3, max_tokens=30, ignore_eos=True)
    found["n"] = [c for o in llm.generate(PROMPTS[:4], params, use_tqdm=False) for c in o.outputs]
    found["prompt_logprobs"] = llm.generate(PROMPTS[:3], SamplingParams(max_tokens=4, prompt_logprobs=3, seed=1))
    found["long"] = generate(llm, LONG[:2], long({}))
    found["seeds"] = generate(llm, LONG, [long(seed) for seed in SEEDS])
    return found


@pytest.fixture(scope="module")
def llm(engines: Engines, plain: dict[str, Any]) -> Any:
    return engines.start(tree(12, threshold=0.2), **ARGUMENTS)


@pytest.mark.parametrize("name", KINDS)
def test_parameter(llm: Any, plain: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = TreeSpy(llm, monkeypatch)
    changed = [list(a.token_ids) != list(b.token_ids) for a, b in zip(plain[name], plain["none"], strict=True)]
    assert any(changed), "a parameter without effect proves nothing"
    assert_identical(plain[name], generate(llm, PROMPTS[:6], batch(KINDS[name])))
    assert any(not t.is_chain for t in spy.trees)


@pytest.mark.skipif(V2, reason="there every batch is sampled at all rows at once")
@pytest.mark.parametrize(
    ("name", "logprobs"),
    [
        pytest.param(name, logprobs, marks=[pytest.mark.slow] * (logprobs and name not in WITH_LOGPROBS))
        for name in KINDS
        for logprobs in (False, True)
        if name != "temperature"
    ],
)
def test_greedy_batch(
    llm: Any, plain: dict[str, Any], name: str, logprobs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is drawn level by level, unless one of the batch has a parameter that greedy sampling heeds, penalties
    apart."""
    from vllm_adaptive_tree.engine.v1.target import Target

    walk, seen = Target.walk_at_once, []
    monkeypatch.setattr(Target, "walk_at_once", lambda *own: seen.append(walk(*own)) or seen[-1])
    ours = generate(llm, PROMPTS[1:6:2], batch(KINDS[name], **({"logprobs": 2} if logprobs else {}))[1::2])
    assert_identical(plain[name][1::2], ours)
    known = [one is not None for one in seen]
    assert known[0] == all(known) == (name in GREEDY_ALIKE | PENALTIES and not logprobs)


def test_n(llm: Any, plain: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.8, seed=7, n=3, max_tokens=30, ignore_eos=True)
    ours = [c for o in llm.generate(PROMPTS[:4], params, use_tqdm=False) for c in o.outputs]
    assert [list(c.token_ids) for c in ours] == [list(c.token_ids) for c in plain["n"]]
    assert len({tuple(c.token_ids) for c in ours}) > 4


@pytest.mark.parametrize("name", LOGPROBS)
def test_logprobs(llm: Any, plain: dict[str, Any], name: str) -> None:
    found = plain["logprobs"]
    assert sum(found[name][0].logprobs[0] == other[0].logprobs[0] for other in found.values()) == 1 or "top_2" in name
    assert isinstance(found[name][0].logprobs, FlatLogprobs) == (name == "flat")
    outputs = generate(llm, PROMPTS[:6], batch(LOGPROBS[name]))
    for i, (ours, theirs) in enumerate(zip(outputs, found[name], strict=True)):
        assert list(ours.token_ids) == list(theirs.token_ids)
        if i >= 4:
            assert ours.logprobs is None
            assert theirs.logprobs is None
            continue
        assert type(ours.logprobs) is type(theirs.logprobs)
        assert len(ours.logprobs) == len(ours.token_ids)
        assert_close(ours.logprobs, theirs.logprobs)
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)


def test_prompt_logprobs(llm: Any, plain: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=4, prompt_logprobs=3, seed=1)
    for ours, theirs in zip(llm.generate(PROMPTS[:3], params), plain["prompt_logprobs"], strict=True):
        assert_close(ours.prompt_logprobs, theirs.prompt_logprobs)


@pytest.mark.parametrize("name", TEXTS)
def test_text(llm: Any, plain: dict[str, Any], name: str) -> None:
    texts = {other: [o.text for o in outputs] for other, outputs in plain["texts"].items()}
    assert sum(text == texts[name] for text in texts.values()) == 1, "a parameter without effect proves nothing"
    ours = generate(llm, PROMPTS[:6], batch(TEXTS[name]))
    for here, there in zip(ours, plain["texts"][name], strict=True):
        assert list(here.token_ids) == list(there.token_ids)
        assert (here.text, here.finish_reason) == (there.text, there.finish_reason)
        assert here.stop_reason == there.stop_reason


@pytest.mark.parametrize("name", STREAMS)
def test_stream(llm: Any, plain: dict[str, Any], name: str) -> None:
    parts = stream(llm, batch({}, **STREAMS[name]))
    for here, there in zip(parts, plain["none"], strict=True):
        sizes = [len(part.token_ids) for part in here]
        if name in ("delta", "stream_interval"):
            assert [t for part in here for t in part.token_ids] == list(there.token_ids)
            assert "".join(part.text for part in here) == there.text
            assert (min(sizes[1:-1]) >= 12) == (name == "stream_interval")
        else:
            assert list(here[-1].token_ids) == list(there.token_ids)
            assert all(there.text.startswith(part.text) for part in here)
            assert sizes == sorted(set(sizes))
        assert (len(here) == 1) == (name == "final_only")
        assert len(here) < len(there.token_ids)  # several tokens arrive in one step
        assert here[-1].finish_reason == there.finish_reason


def test_skip_reading_prefix_cache(llm: Any, plain: dict[str, Any]) -> None:
    hits = []
    for skip in (False, True, False):
        before = metric(llm, "prefix_cache_hits")
        assert_identical(plain["long"], generate(llm, LONG[:2], long({"skip_reading_prefix_cache": skip})))
        hits.append(metric(llm, "prefix_cache_hits") - before)
    assert hits[1] == 0
    assert hits[2] > 0


@pytest.mark.parametrize("name", REFUSED)
def test_refused(llm: Any, name: str) -> None:
    value, words = REFUSED[name]
    with pytest.raises((ValueError, VLLMValidationError), match=words):
        generate(llm, PROMPTS[:1], SamplingParams(**{name: value}))


@pytest.mark.parametrize("name", REFUSED_AT_START)
def test_refused_at_start(name: str) -> None:
    value, words = REFUSED_AT_START[name]
    with pytest.raises(ValueError, match=words):
        EngineArgs(TARGET, speculative_config=tree(12), max_model_len=512, **{name: value}).create_engine_config()


def test_no_field_is_forgotten() -> None:
    tables = (KINDS, LOGPROBS, TEXTS, STREAMS)
    tested = {field for table in tables for kind in table.values() for field in kind}
    tested |= {"n", "seed", "max_tokens", "ignore_eos", "prompt_logprobs", "skip_reading_prefix_cache"}
    tested |= {"structured_outputs"}  # test_structured.py
    behind_a_refusal = {*REFUSED, "watermarking", "routed_experts_prompt_start"}
    not_the_engine_s = {"spaces_between_special_tokens", "extra_args", "skip_clone", "output_text_buffer_length"}
    fields = {field for field in SamplingParams.__struct_fields__ if not field.startswith("_")}
    assert fields == tested | behind_a_refusal | not_the_engine_s


@pytest.fixture(scope="module")
def chunked(engines: Engines, llm: Any) -> Any:
    return engines.start(tree(12, threshold=0.2), **ARGUMENTS, **CHUNKED)


@pytest.mark.parametrize("name", CHUNKS)
def test_chunked_prefill(chunked: Any, plain: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = TreeSpy(chunked, monkeypatch)
    params = [long({**kind, "logprobs": None}) for kind in CHUNKS[name]]
    outputs = chunked.generate(LONG, params, use_tqdm=False)
    theirs = plain[f"chunked {name}"]
    assert_identical([o.outputs[0] for o in theirs], [o.outputs[0] for o in outputs])
    for here, there, kind in zip(outputs, theirs, CHUNKS[name], strict=True):
        if "prompt_logprobs" in kind:
            assert len(there.prompt_logprobs) == len(there.prompt_token_ids) > 3 * CHUNKED["max_num_batched_tokens"]
            assert_close(here.prompt_logprobs, there.prompt_logprobs)
    if name == "thinking_token_budget":
        none = plain["chunked none"]
        assert all(o.outputs[0].token_ids != p.outputs[0].token_ids for o, p in zip(theirs, none, strict=True))
    assert any(not t.is_chain for t in spy.trees)


def test_seeds_and_chunked_prefill(chunked: Any, plain: dict[str, Any]) -> None:
    """Against a plain engine that takes prompts whole: with chunks, vLLM dies of a CPU generator without an offset."""
    ours = generate(chunked, LONG, [long({**seed, "logprobs": None}) for seed in SEEDS])
    assert [list(o.token_ids) for o in ours] == [list(o.token_ids) for o in plain["seeds"]]
    greedy = [o.outputs[0].token_ids for o in plain["chunked none"]]
    assert all(o.token_ids != other for o, other in zip(ours, greedy, strict=True))


def test_vllm_s_own_chain_still_refuses(engines: Engines, chunked: Any) -> None:
    chain = engines.start({"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3})
    for refused in ({"min_p": 0.1}, {"logit_bias": {3: 1.0}}):
        with pytest.raises(VLLMValidationError, match="not yet supported with speculative"):
            generate(chain, PROMPTS[:1], SamplingParams(**refused))


@pytest.mark.skipif(V2, reason="there the target's own draws of these rows are compared")
def test_distributions_of_all_nodes(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a rule takes all at once are those of vLLM's sampler, node by node; so are those of a batch without a
    tree, whose tokens are what the rule would draw."""
    from vllm_adaptive_tree.engine.v1.target import Target

    rows, at_once, sizes, alone = Target._rows, Target.rule_at_once, list[int](), list[int]()

    def compared(self: Any, request: int, size: int, *rest: Any) -> Any:
        found = rows(self, request, size, *rest)
        active = torch.arange(len(self.first)) == request
        for node in range(-1, size):
            at = torch.where(active, node, -1)
            torch.testing.assert_close(found.p[1 + node], self.probs(at, active)[request], atol=1e-7, rtol=1e-5)
        sizes.append(size)
        return found

    def ruled(self: Any, pair: Any, verification: Any, rng: Any, active: Any) -> Any:
        found = at_once(self, pair, verification, rng, active)
        if not verification.trees:
            everyone = torch.ones(len(self.first), dtype=torch.bool)
            one_by_one = at_once(self, pair, verification, rng, everyone)
            assert all(torch.equal(one, other) for one, other in zip(found, one_by_one, strict=True))
            alone.append(len(everyone))
        return found

    monkeypatch.setattr(Target, "_rows", compared)
    monkeypatch.setattr(Target, "rule_at_once", ruled)
    options = {"budget": None, "threshold": 0.05, "max_children": 3}
    llm = engines.start({"method": "dyspec", "model": DRAFT, "num_speculative_tokens": 8, "tree": options})
    laws: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.9, "frequency_penalty": -0.4, "min_p": 0.05},
        {"repetition_penalty": 0.8, "top_k": 9, "top_p": 0.9},
    ]
    common = {"temperature": 0.7, "max_tokens": LENGTH, "ignore_eos": True}
    generate(llm, PROMPTS[:4], [SamplingParams(**common, **law) for law in laws])
    assert max(sizes) > 4
    assert max(alone) > 1
