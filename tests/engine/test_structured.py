"""Structured output: compared by token with plain decoding, because a wrong mask still yields valid texts."""

import json
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.engine.engines import PROMPTS, V2, Engines, TreeSpy, assert_identical, generate, metric, runner_of, tree
from tests.engine.figures import counts
from vllm_adaptive_tree.engine.grammar import walk as grammar
from vllm_adaptive_tree.trees import TokenTree

if V2:
    from vllm_adaptive_tree.engine.v2 import verification

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
TAGS = {
    "structures": [{"begin": "self.", "schema": {"type": "integer"}, "end": " "}],
    "triggers": ["self"],
}
SHAPES: list[dict[str, Any]] = [
    {"regex": r"[a-z_]{3,12}\(([a-z]{1,8}, )*[a-z]{1,8}\)"},
    {"choice": ["None", "NotImplemented", "NotImplementedError", "not implemented yet"]},
    {"json": SCHEMA},
    {"grammar": 'root ::= "return " term (" + " term)*\nterm ::= [a-z]+ | "(" [a-z]+ " * " [0-9]+ ")"'},
    {"structural_tag": json.dumps(TAGS)},
    {"json_object": True},
]
LARK = {"grammar": 'start: "return " term (" + " term)*\nterm: /[a-z]+/ | "(" /[a-z]+/ " * " /[0-9]+/ ")"'}
NUMBERS = {"grammar": 'start: "return " <[276]> <[16]> /[a-z.]{2,8}/ <[201]>'}
"""In the syntax of guidance; it names tokens by number: "self", ".", which any draft has after it, and a line's end."""
ONE_TOKEN = {"choice": ["return"]}
OF_BACKEND = (
    {"guidance": [NUMBERS]}
    if V2
    else {
        "guidance": [NUMBERS, *SHAPES[:3], LARK, NUMBERS, SHAPES[5]],
        "outlines": SHAPES[:3],
    }
)


TEXTS, LENGTH = (PROMPTS[:7], 16) if V2 else (PROMPTS, 40)  # the interpreter is slow


def batch(start: int, shapes: Sequence[dict[str, Any]] = SHAPES) -> list[SamplingParams]:
    """For each text one: every shape, greedy and seeded; every fifth is free of structure, every seventh goes on after
    its grammar has ended."""
    params = []
    for i in range(len(TEXTS)):
        shape = None if i % 5 == 4 else StructuredOutputsParams(**shapes[(i + start) % len(shapes)])
        law = {"temperature": 0 if i % 2 else 0.9, "seed": start + i, "ignore_eos": i % 7 == 6}
        params.append(SamplingParams(**law, max_tokens=LENGTH, logprobs=2, structured_outputs=shape))
    return params


STARTS = range(1 if V2 else 2)  # with two every shape is greedy once, and seeded once


class Reasoner:
    """A request reasons up to its first line's end."""

    def __init__(self, tokenizer: Any):
        self.end = tokenizer("\n").input_ids[-1]

    def is_reasoning_end(self, tokens: Sequence[int]) -> bool:
        return False

    def is_reasoning_end_streaming(self, tokens: Sequence[int], delta: Sequence[int]) -> bool:
        return self.end in delta


def manager_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.structured_output_manager


def everything(llm: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    found = {"xgrammar": [one for start in STARTS for one in generate(llm, TEXTS, batch(start))]}
    with monkeypatch.context() as patch:
        patch.setattr(manager_of(llm), "reasoner_cls", Reasoner)
        if V2:  # its trees stay as they are drafted, as their masks
            patch.setattr(verification, "IN_GENERATION_ORDER", 0)
        found["reasoning"] = generate(llm, TEXTS, batch(1, [*SHAPES, ONE_TOKEN]))
    return found | {backend: of_backend(llm, backend, monkeypatch) for backend in OF_BACKEND}


def of_backend(llm: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    some = TEXTS[:2] if V2 else TEXTS
    with monkeypatch.context() as patch:
        patch.setattr(manager_of(llm), "backend", None)
        patch.setattr(manager_of(llm), "backend_name", None, raising=False)  # from 0.33 on
        patch.setattr(llm.llm_engine.vllm_config.structured_outputs_config, "backend", backend)
        found = generate(llm, some, batch(2, OF_BACKEND[backend])[: len(some)])
        assert type(manager_of(llm).backend).__name__.lower().startswith(backend)
    return found


@pytest.fixture(scope="module")
def plain(engines: Engines) -> dict[str, list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        return everything(engines.start(), patch)


@pytest.fixture(scope="module")
def llm(engines: Engines, plain: dict[str, list[Any]]) -> Any:
    return engines.start(tree(12, threshold=0.2))


class GrammarSpy(TreeSpy):
    """The trees of requests with a grammar, and what their steps emit."""

    def __init__(self, llm: Any, monkeypatch: pytest.MonkeyPatch):
        super().__init__(llm, monkeypatch)
        runner = runner_of(llm)
        self.structured: list[tuple[list[int], TokenTree]] = []
        """Output of a request, and its tree."""
        self.emitted: list[list[int]] = []
        original = runner._sample

        def sample(*args: Any) -> Any:
            names = runner.input_batch.req_ids
            under = [row for row, name in enumerate(names) if runner.requests[name].sampling_params.structured_outputs]
            trees = runner.step.verification.trees
            states = {row: runner.requests[names[row]] for row in under if row in trees}
            self.structured += [([*state.output_token_ids], trees[row]) for row, state in states.items()]
            output = original(*args)
            self.emitted += [output.sampled_token_ids[row].tolist() for row in under]
            return output

        monkeypatch.setattr(runner, "_sample", sample)


def test_structured_output(llm: Any, plain: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    spy = TreeSpy(llm, monkeypatch) if V2 else GrammarSpy(llm, monkeypatch)
    ours = everything(llm, monkeypatch)
    assert not any(output.finish_reason == "error" for output in plain["guidance"])
    for name, outputs in plain.items():
        assert_identical(outputs, ours[name])
    if isinstance(spy, GrammarSpy):
        assert sum(output.finish_reason == "stop" for output in ours["xgrammar"]) > 4 * len(STARTS)
        end, line = llm.get_tokenizer().eos_token_id, Reasoner(llm.get_tokenizer()).end
        assert sum(not one.is_chain for _, one in spy.structured) > len(spy.structured) / 4
        assert any(end in tokens[1:] for tokens in spy.emitted), "a grammar ends inside an accepted path"
        inside = [tokens for tokens in spy.emitted if line in [one for one in tokens if one >= 0][1:-1]]
        assert inside, "reasoning ends inside an accepted path"
        assert any(end in tokens[tokens.index(line) :] for tokens in inside), "and the grammar behind it"
    else:
        assert any(not one.is_chain for one in spy.trees)


def test_faults_of_a_grammar_cost_trees(llm: Any, plain: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong rollback, as of a backend without copies (guidance, over tokens named by number); a tree without masks,
    whose nodes have been verified."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no masks")

    def lost() -> float:
        return counts(llm, "adaptive_tree_fallbacks", "reason").get("grammar", 0)

    assert not lost(), "in any other test"
    with monkeypatch.context() as patch:
        patch.setattr(grammar, "COPIES", {})
        assert_identical(plain["guidance"], of_backend(llm, "guidance", monkeypatch))
    before, some = lost(), TEXTS[:2] if V2 else TEXTS
    assert before
    monkeypatch.setattr(manager_of(llm), "backend", None)
    monkeypatch.setattr(manager_of(llm), "backend_name", None, raising=False)  # from 0.33 on
    monkeypatch.setattr(grammar, "_traverse", fail)
    assert_identical(plain["xgrammar"][: len(some)], generate(llm, some, batch(0)[: len(some)]))
    assert lost() > before


@pytest.mark.skipif(V2, reason="its draft does not follow the grammar")
def test_nothing_rejected_is_drafted(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spy, tokenizer = GrammarSpy(llm, monkeypatch), llm.get_tokenizer()
    choices = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(**SHAPES[1]), max_tokens=30)
    assert {output.text for output in generate(llm, PROMPTS, choices)} <= set(SHAPES[1]["choice"])
    ends = [f"{choice}{tokenizer.eos_token}" for choice in SHAPES[1]["choice"]]
    nodes = 0
    for output, tokens in spy.structured:
        for node in range(len(tokens)):
            text = tokenizer.decode([*output, *(tokens.tokens[one] for one in tokens.path_to(node))])
            nodes += text.count(tokenizer.eos_token) == 0
            assert any(one.startswith(text) or text.startswith(one) for one in ends), text
    assert nodes > 50


def test_bad_grammars_fail_alone(llm: Any, plain: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VLLMValidationError):
        llm.generate(PROMPTS[0], SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), use_tqdm=False)
    generate(llm, PROMPTS[:1], batch(0)[:1])  # the first one makes the backend
    compile_grammar = manager_of(llm).backend.compile_grammar

    def failing(kind: Any, text: str, **more: Any) -> Any:
        if text == "unlucky":
            raise ValueError("it compiles nowhere")
        return compile_grammar(kind, text, **more)

    monkeypatch.setattr(manager_of(llm).backend, "compile_grammar", failing)
    engine, outputs = llm.llm_engine, {}
    for i, params in enumerate(batch(0)[:4]):
        params.output_kind = RequestOutputKind.FINAL_ONLY
        engine.add_request(f"good-{i}", PROMPTS[i], params)
        bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="unlucky"))
        engine.add_request(f"bad-{i}", PROMPTS[i], bad)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output.outputs[0]
    assert_identical(plain["xgrammar"][:4], [outputs[f"good-{i}"] for i in range(4)])
    assert {outputs[f"bad-{i}"].finish_reason for i in range(4) if f"bad-{i}" in outputs} <= {"error"}


@pytest.mark.skipif(V2, reason="it steers the V1 adapter's budget")
def test_rests_chunks_and_preemptions(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft rests in two steps of five, prompts come in chunks, and the cache is too small for all."""
    small = {"max_model_len": 256, "max_num_batched_tokens": 96, "num_gpu_blocks_override": 22}
    long = ["\n\n".join(PROMPTS[i:] + PROMPTS[:i])[:300] for i in range(16)]
    params = [*batch(0), *batch(1)]
    for one in params:
        one.temperature, one.seed = 0, None  # plain vLLM cannot read a seeded request's prompt in chunks on a CPU
    wanted = generate(engines.start(**small), long * 2, params)
    llm = engines.start(tree(12, budget="auto"), **small)
    budget, rests = runner_of(llm).budget, cycle([3, 0, 3, 5, 0])

    def begin_levels(greedy: Sequence[bool]) -> int:
        budget.levels = next(rests)
        return budget.levels

    monkeypatch.setattr(budget, "begin_levels", begin_levels)
    assert_identical(wanted, generate(llm, long * 2, params))
    assert metric(llm, "num_preemptions") > 0
    assert metric(llm, "spec_decode_num_accepted_tokens") > 0


@pytest.mark.slow
@pytest.mark.skipif(V2, reason="its draft does not follow the grammar")
def test_steps_of_the_benchmark(engines: Engines) -> None:
    """Of 80 requests, beside single paths that are drafted without the grammar."""
    from benchmarks.structured import KINDS, MaskClock, run

    engines.shutdown()
    ways = ("first paths", "OPT-Tree")
    before, after = ({row["kind"]: row for row in run(way, MaskClock(), KINDS, 80, 1)} for way in ways)
    for kind, row in after.items():
        assert row["failed"] == 0
        assert row["tokens"] == before[kind]["tokens"]
        assert row["tokens_per_step"] > before[kind]["tokens_per_step"]
    assert after["mix"]["tokens_per_step"] > 2 * before["mix"]["tokens_per_step"]
