"""Options of one request: trees off, smaller, chosen or drawn, and seeds of the rule, in one batch with others."""

from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engines import PROMPTS, V2, Engines, TreeSpy, assert_identical, generate, metric, runner_of, tree
from tests.engine.figures import counts

TEXTS, TOKENS, NODES = PROMPTS[:8], 12 if V2 else 24, 12  # the interpreter is slow
ASKED: list[Any] = [None, False, {"nodes": 3}, {"kind": "chosen"}, '{"nodes": 1, "kind": "chosen"}', {}, 0, None]
REPRODUCIBLE = {"tree": {"seed": "reproducible"}}


def params(asked: list[Any], **common: Any) -> list[SamplingParams]:
    """Greedy and seeded requests in turn."""
    laws: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0}]
    return [
        SamplingParams(
            max_tokens=TOKENS,
            ignore_eos=True,
            seed=i,
            extra_args=None if one is None else {"tree": one},
            **laws[i // 2 % 2],
            **common,
        )
        for i, one in enumerate(asked)
    ]


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    return generate(engines.start(), TEXTS, params([None] * 8, logprobs=2))


@pytest.fixture(scope="module")
def llm(engines: Engines, plain: list[Any]) -> Any:
    config = tree(NODES)
    return engines.start({**config, "method": "adaptive_tree"})


def test_identity(llm: Any, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch in which each request asks for something else: its tokens are those of vLLM without speculation."""
    spy = TreeSpy(llm, monkeypatch)
    assert_identical(plain, generate(llm, TEXTS, params(ASKED)))
    assert any(len(one) > 3 for one in spy.trees)
    assert counts(llm, "adaptive_tree_requests", "asked") == {"off": 2, "nodes": 2, "chosen": 2}
    assert counts(llm, "adaptive_tree_fallbacks", "reason")["request"] == 2 * (TOKENS - 1)


@pytest.mark.parametrize(("asked", "sizes"), [(False, {0}), ({"nodes": 3}, {1, 2, 3})])
def test_sizes(llm: Any, plain: list[Any], asked: Any, sizes: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole batch asks for the same; with no trees the draft is not run."""
    spy, forwards = TreeSpy(llm, monkeypatch), list[Any]()
    if not V2:
        drafter = runner_of(llm).drafter
        forward = drafter._forward
        monkeypatch.setattr(drafter, "_forward", lambda *own: forwards.append(own) or forward(*own))
    before = metric(llm, "adaptive_tree_drafted_nodes")
    assert_identical(plain, generate(llm, TEXTS, params([asked] * 8)))
    found = {len(one) for one in spy.trees}
    assert found <= sizes | {0}
    assert max(found, default=0) == max(sizes)
    assert (metric(llm, "adaptive_tree_drafted_nodes") > before) == (asked is not False)
    assert V2 or bool(forwards) == (asked is not False)


def test_children_of_a_request(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen ones walk with the target's own draws, drawn ones by the rule; without a seed both are lawful."""
    from vllm_adaptive_tree.step import step

    accept, seen = step.accept, list[Any]()

    def spied(pair: Any, target: Any, verification: Any, requests: Any) -> Any:
        seen.append(requests.from_target)
        return accept(pair, target, verification, requests)

    monkeypatch.setattr(step, "accept", spied)
    for kind, temperature in (("chosen", 1.0), ("drawn", 0.2)):
        seen.clear()
        sampling = SamplingParams(temperature=temperature, max_tokens=6, extra_args={"tree": {"kind": kind}})
        generate(llm, TEXTS[:1], sampling)
        assert seen
        assert all((flags is not None) == (kind == "chosen") for flags in seen)


def test_a_reproducible_seed(engines: Engines, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text alone, among others, and again; another seed has another. It costs fewer steps than vLLM's own
    samples, which are the default."""
    config = {**tree(NODES), "method": "static_tree"}
    llm = engines.start(config, max_num_seqs=16)

    def steps() -> float:
        return metric(llm, "adaptive_tree_decode_steps")

    def texts(prompts: list[str], first: int, **more: Any) -> list[list[int]]:
        own = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=first + i, **more) for i in range(len(prompts))]
        return [list(output.token_ids) for output in generate(llm, prompts, own)]

    begun = steps()
    together = texts(TEXTS, 0, extra_args=REPRODUCIBLE)
    by_rule, begun = steps() - begun, steps()
    default = texts(TEXTS, 0)
    assert by_rule < steps() - begun
    assert together == texts(TEXTS, 0, extra_args=REPRODUCIBLE)
    assert together[1] == texts(TEXTS[1:2], 1, extra_args=REPRODUCIBLE)[0]
    assert together[:2] == texts([*TEXTS[:2], *TEXTS[4:]], 0, extra_args=REPRODUCIBLE)[:2]
    others = texts(TEXTS, 100, extra_args=REPRODUCIBLE)
    assert all(a != b for a, b in zip(together, others, strict=True))
    assert sum(a != b for a, b in zip(together, default, strict=True)) > 4
