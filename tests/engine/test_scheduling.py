"""Whatever the scheduler does between and inside steps, the output stays that of vLLM without speculation."""

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engine.engines import (
    DRAFT,
    ENGINE,
    PROMPTS,
    V2,
    Engines,
    assert_identical,
    generate,
    metric,
    runner_of,
    tree,
)

LONG = ["\n\n".join(PROMPTS[i:] + PROMPTS[:i]) for i in range(0, 16, 3)]  # about 200 tokens each
SMALL = {"max_model_len": 320, "max_num_batched_tokens": 64}  # prompts come in chunks


def greedy(tokens: int, **extra: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **extra})


STOPS = [
    greedy(60, stop=["return", "self"]),
    greedy(60, stop=["\n\n"], include_stop_str_in_output=True),
    greedy(60, stop_token_ids=list(range(270, 320))),
    greedy(60, ignore_eos=False, min_tokens=12, stop_token_ids=list(range(270, 380))),
] * 4


@pytest.fixture(scope="module")
def plain(engines: Engines) -> dict[str, list[Any]]:
    def with_logprobs(params: Any) -> Any:
        params = [params] if isinstance(params, SamplingParams) else params
        copies = [p.clone() for p in params]
        for p in copies:
            p.logprobs = 2
        return copies if len(copies) > 1 else copies[0]

    llm = engines.start(**SMALL)
    return {
        "long": generate(llm, LONG, with_logprobs(greedy(24))),
        "end": generate(llm, LONG, with_logprobs(greedy(200))),  # until max_model_len
        "stops": generate(llm, PROMPTS, with_logprobs(STOPS)),
        "short": generate(llm, PROMPTS, with_logprobs(greedy(40))),
    }


@pytest.fixture(scope="module")
def small(engines: Engines, plain: dict[str, list[Any]]) -> Any:
    return engines.start(tree(12), **SMALL)


def test_chunked_prefill_then_prefix_cache_hits(small: Any, plain: dict[str, list[Any]]) -> None:
    assert_identical(plain["long"], generate(small, LONG, greedy(24)))
    hits = metric(small, "prefix_cache_hits")
    assert_identical(plain["long"], generate(small, LONG, greedy(24)))
    assert metric(small, "prefix_cache_hits") > hits


def test_max_model_len_reached(small: Any, plain: dict[str, list[Any]]) -> None:
    assert {output.finish_reason for output in plain["end"]} == {"length"}
    assert min(len(output.token_ids) for output in plain["end"]) < 200
    assert_identical(plain["end"], generate(small, LONG, greedy(200)))


def test_stop_strings_and_stop_tokens(small: Any, plain: dict[str, list[Any]]) -> None:
    assert sum(output.finish_reason == "stop" for output in plain["stops"]) >= 4
    assert_identical(plain["stops"], generate(small, PROMPTS, STOPS))


def test_abort_in_flight(small: Any, plain: dict[str, list[Any]]) -> None:
    engine = small.llm_engine
    params = greedy(40, output_kind=RequestOutputKind.FINAL_ONLY)
    for i in range(8):
        engine.add_request(f"abort-{i}", PROMPTS[i], params)
    outputs = {}
    for step in range(200):
        for output in engine.step():
            outputs[output.request_id.split("-")[1]] = output.outputs[0]
        if step == 4:
            engine.abort_request(["abort-1", "abort-6"], internal=False)
        if not engine.has_unfinished_requests():
            break
    assert not engine.has_unfinished_requests()
    survivors = [i for i in range(8) if i not in (1, 6)]
    assert_identical([plain["short"][i] for i in survivors], [outputs[str(i)] for i in survivors])


def test_a_prompt_that_is_cached_but_for_a_token(engines: Engines) -> None:
    """vLLM would pad it with draft tokens -1, of no tree. A draft with K/V reads its last block again."""
    prompt = {"prompt_token_ids": list(range(1, 2 + 2 * ENGINE["block_size"]))}
    plain = generate(engines.start(**SMALL), [prompt], greedy(24, logprobs=2))
    llm = engines.start({**tree(12), "model": "ngram"}, **SMALL)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert scheduler.dynamic_sd_lookup is not None
    for cached in (0, 2 * ENGINE["block_size"], 2 * ENGINE["block_size"]):
        hits = metric(llm, "prefix_cache_hits")
        assert_identical(plain, generate(llm, [prompt], greedy(24)))
        assert metric(llm, "prefix_cache_hits") - hits == cached
        if cached:
            scheduler.dynamic_sd_lookup = None  # as if the schedule had been lost


def test_preemption(engines: Engines, plain: dict[str, list[Any]]) -> None:
    llm = engines.start(tree(12), **SMALL, num_gpu_blocks_override=24)
    assert_identical(plain["short"], generate(llm, PROMPTS, greedy(40)))
    assert metric(llm, "num_preemptions") > 0


def test_every_running_request_gets_a_token_in_every_step(engines: Engines) -> None:
    llm = engines.start(tree(60), max_model_len=256, max_num_batched_tokens=512, max_num_seqs=32)
    engine = llm.llm_engine
    params = greedy(30, output_kind=RequestOutputKind.DELTA)
    for i in range(32):
        engine.add_request(str(i), PROMPTS[i % 16][: 20 + i], params)
    started: set[str] = set()
    nodes = metric(llm, "spec_decode_num_draft_tokens")
    while engine.has_unfinished_requests():
        outputs = engine.step()
        served = {output.request_id for output in outputs if output.outputs[0].token_ids}
        assert started <= served, "a running request was left out"
        started = (started | served) - {output.request_id for output in outputs if output.finished}
    assert metric(llm, "spec_decode_num_draft_tokens") > nodes


PAIRS = {
    "dyspec": {**tree(12), "method": "dyspec", "rejection_sample_method": "rrsw"},
    "static_tree": {**tree(12, shape=[3, 2, 1]), "method": "static_tree", "rejection_sample_method": "traversal"},
}


def in_turn(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Every second request is sampled, without a seed, and ends at another length."""
    copies = [params.clone() for _ in range(count)]
    for i in range(1, count, 2):
        copies[i].temperature, copies[i].max_tokens = 0.9, copies[i].max_tokens - i % 7
    return copies


class LawSpy:
    """Compares the laws kept beside every tree with what the draft model says of that text, read alone."""

    def __init__(self, llm: Any, monkeypatch: pytest.MonkeyPatch):
        from transformers import AutoModelForCausalLM

        self.draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
        self.runner, self.laws = runner_of(llm), 0
        original = self.runner._sample

        def sample(logits: Any, metadata: Any) -> Any:
            for row, draft in self.runner.step.verification.drafts.items():
                if draft.logits is not None:  # a batch that is all greedy reads none
                    self.check(self.runner.input_batch.req_ids[row], draft)
            return original(logits, metadata)

        monkeypatch.setattr(self.runner, "_sample", sample)

    def check(self, request: str, draft: Any) -> None:
        """At the root and at the last inner node."""
        state = self.runner.requests[request]
        for node in {-1, max(draft.tree.parents, default=-1)}:
            path, at = [], node
            while at >= 0:
                path, at = [draft.tree.tokens[at], *path], draft.tree.parents[at]
            text = torch.tensor([[*state.prompt_token_ids, *state.output_token_ids, *path]])
            with torch.inference_mode():
                law = (self.draft(text).logits[0, -1] / draft.temperature).softmax(-1)
            torch.testing.assert_close(draft.probs(node), law, atol=1e-4, rtol=0)
            self.laws += 1


@pytest.mark.skipif(V2, reason="it reads the V1 adapter's drafts")
@pytest.mark.parametrize("method", PAIRS)
def test_draft_laws_survive_what_happens_between_steps(
    engines: Engines, plain: dict[str, list[Any]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines.start(PAIRS[method], **SMALL, num_gpu_blocks_override=24)
    spy = LawSpy(llm, monkeypatch)
    for prompts in (LONG, LONG[:2], LONG[:2]):  # in chunks, and at last from the prefix cache
        hits = metric(llm, "prefix_cache_hits")
        ours = generate(llm, prompts, in_turn(greedy(24), len(prompts)))
        assert_identical(plain["long"][: len(prompts) : 2], ours[::2])
    assert metric(llm, "prefix_cache_hits") > hits
    before = metric(llm, "num_preemptions")

    engine = llm.llm_engine
    for i, params in enumerate(in_turn(greedy(40, output_kind=RequestOutputKind.FINAL_ONLY), 16)):
        engine.add_request(f"own-{i}", PROMPTS[i], params)
    outputs, steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[int(output.request_id.split("-")[1])] = output.outputs[0]
        steps += 1
        if steps == 4:
            engine.abort_request(["own-1", "own-4", "own-6"], internal=False)
    survivors = [i for i in range(0, 16, 2) if i not in (4, 6)]
    assert_identical([plain["short"][i] for i in survivors], [outputs[i] for i in survivors])
    assert metric(llm, "num_preemptions") > before
    assert spy.laws > 200
