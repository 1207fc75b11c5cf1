"""What trees of other engines have failed on, a test for each failure that no other file has.

docs/support-matrix.md lists the others.
"""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engine.engines import DRAFT, PROMPTS, Engines, TreeSpy, assert_identical, generate, metric, tree

BLOCK = 32
TOKENS = 24
SHARED = "\n\n".join(PROMPTS[:6])


def greedy(tokens: int = TOKENS, **extra: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **extra)


def at_borders(llm: Any) -> list[Any]:
    """Prompts around one, two and three blocks."""
    text = llm.get_tokenizer().encode("\n\n".join(PROMPTS))
    lengths = [k * BLOCK + more for k in (1, 2, 3) for more in (-1, 0, 1)]
    return [{"prompt_token_ids": text[i : i + length]} for i, length in enumerate(lengths)]


REPEATED = [PROMPTS[0], PROMPTS[0], PROMPTS[3], PROMPTS[0]]
STORM = [SHARED + prompt for prompt in PROMPTS]
KEPT = [i for i in range(len(STORM)) if i % 4 == 3]
"""The requests that nobody cancels."""


def turns(llm: Any) -> tuple[list[list[int]], list[int]]:
    """A chat of three turns: tokens of each answer, and how many tokens of each prompt were cached."""
    llm.reset_prefix_cache()
    text, answers, cached = llm.get_tokenizer().encode(SHARED), [], []
    for prompt in PROMPTS[:3]:
        text = text + llm.get_tokenizer().encode(prompt)
        (output,) = llm.generate([{"prompt_token_ids": text}], greedy(), use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
        cached.append(output.num_cached_tokens)
        text = text + answers[-1]
    return answers, cached


@pytest.fixture(scope="module")
def plain(engines: Engines) -> dict[str, Any]:
    llm = engines.start()
    return {
        "borders": generate(llm, at_borders(llm), greedy(logprobs=2)),
        "repeated": generate(llm, REPEATED, greedy(logprobs=2)),
        "storm": generate(llm, [STORM[i] for i in KEPT], greedy(40, logprobs=2)),
        "turns": turns(llm),
    }


@pytest.fixture(scope="module")
def llm(engines: Engines, plain: dict[str, Any]) -> Any:
    return engines.start(tree(12))


def test_prompts_that_end_at_a_block(llm: Any, plain: dict[str, Any]) -> None:
    """K/V went wrong where a prefix was exactly a block (sglang#22819). The second time all prefixes are cached."""
    for _ in range(2):
        assert_identical(plain["borders"], generate(llm, at_borders(llm), greedy()))
    assert metric(llm, "prefix_cache_hits") > 0


def test_one_prompt_several_times_in_a_batch(llm: Any, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones of a batch had other drafts (sglang#8726)."""
    spy = TreeSpy(llm, monkeypatch)
    for _ in range(2):
        assert_identical(plain["repeated"], generate(llm, REPEATED, greedy()))
    whole = [[one.tokens for one in batch] for batch in spy.batches if len(batch) == len(REPEATED)]
    assert whole
    for first, second, other, third in whole:
        assert first == second == third != other


def test_a_chat_finds_its_prefix(llm: Any, plain: dict[str, Any]) -> None:
    """Drafts cost an engine most of its prefix hits in chats (sglang#32459)."""
    answers, cached = plain["turns"]
    assert turns(llm) == (answers, cached)
    assert cached[2] > cached[1] > 0


def test_a_storm_of_cancels_on_a_shared_prefix(llm: Any, plain: dict[str, Any]) -> None:
    """Cancels and retries in mid-flight changed the others' texts (sglang#23392); and every block comes back."""
    engine = llm.llm_engine
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    params = greedy(40, output_kind=RequestOutputKind.FINAL_ONLY)
    for i, prompt in enumerate(STORM):
        engine.add_request(f"storm-{i}", prompt, params)
    ended, cancels, step = dict[str, Any](), 0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            ended[output.request_id] = output.outputs[0]
        step += 1
        if step % 2 and cancels < 24:
            victim = [i for i in range(len(STORM)) if i not in KEPT][cancels % 12]
            engine.abort_request([f"storm-{victim}", f"retry-{victim}-{cancels - 12}"], internal=False)
            engine.add_request(f"retry-{victim}-{cancels}", STORM[victim], params)
            cancels += 1
    assert cancels > 8
    assert_identical(plain["storm"], [ended[f"storm-{i}"] for i in KEPT])
    while engine.engine_core.engine_core.scheduler.has_requests():
        engine.step()
    assert pool.get_num_free_blocks() == free


def test_a_tree_of_depth_1(engines: Engines, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A static tree of one level did not start (TensorRT-LLM#10323)."""
    llm = engines.start({**tree(3, shape=[3]), "method": "static_tree"})
    spy = TreeSpy(llm, monkeypatch)
    assert_identical(plain["borders"], generate(llm, at_borders(llm), greedy()))
    assert {one.parents for one in spy.trees} == {(-1, -1, -1)}
    accepted, steps = (metric(llm, f"spec_decode_num_{what}") for what in ("accepted_tokens", "drafts"))
    assert 0 < accepted <= steps


def accepted_per_step(llm: Any) -> float:
    generate(llm, PROMPTS, greedy(40))
    return metric(llm, "spec_decode_num_accepted_tokens") / metric(llm, "spec_decode_num_drafts")


def test_more_nodes_are_never_accepted_less(engines: Engines) -> None:
    """A wider tree accepted less, since its K/V were rewound by a wrong count (TensorRT-LLM#10343); a tree that is a
    chain accepted less than the chain (#15842)."""
    chain = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3}
    shapes = {
        name: {**tree(sum(widths), shape=list(widths)), "method": "static_tree"} for name, widths in SHAPES.items()
    }
    found = {name: accepted_per_step(engines.start(config)) for name, config in {"vllm": chain, **shapes}.items()}
    assert found["chain"] == pytest.approx(found["vllm"], abs=0.03), (
        "but for the last steps, where vLLM's drafts nothing"
    )
    assert found["chain"] < found["pairs"] < found["wide"]


SHAPES = {"chain": (1, 1, 1), "pairs": (2, 2, 2), "wide": (4, 6, 8)}
