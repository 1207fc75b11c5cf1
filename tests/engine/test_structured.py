"""Structured output: 64 prompts, compared by token, because a wrong mask still yields valid texts."""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.engines import PROMPTS, V2, Engines, TreeSpy, assert_identical, generate, tree

SHAPES: list[dict[str, Any]] = [
    {"regex": r"[a-z_]{3,12}\(([a-z]{1,8}, )*[a-z]{1,8}\)"},
    {"choice": ["None", "NotImplemented", "NotImplementedError", "not implemented yet"]},
    {
        "json": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}},
            "required": ["name", "size"],
        }
    },
    {"grammar": 'root ::= "return " term (" + " term)*\nterm ::= [a-z]+ | "(" [a-z]+ " * " [0-9]+ ")"'},
]


def batch(start: int) -> list[SamplingParams | None]:
    """16 requests: every shape, greedy and seeded; every fifth request is free of structure and gets a tree."""
    params = []
    for i in range(16):
        shape = None if i % 5 == 4 else StructuredOutputsParams(**SHAPES[(i + start) % 4])
        law = {"temperature": 0 if i % 2 else 0.9, "seed": start + i}
        params.append(SamplingParams(**law, max_tokens=40, logprobs=2, structured_outputs=shape))
    return params


STARTS = range(1 if V2 else 5)  # the interpreter is slow


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    llm = engines.start()
    return [output for start in STARTS for output in generate(llm, PROMPTS, batch(start))]


def test_structured_output(engines: Engines, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engines.start(tree(12, threshold=0.2))
    spy = TreeSpy(llm, monkeypatch)
    ours = [output for start in STARTS for output in generate(llm, PROMPTS, batch(start))]
    assert_identical(plain, ours)
    assert sum(output.finish_reason == "stop" for output in ours) > 4 * len(STARTS)
    assert any(not t.is_chain for t in spy.trees)
    structured = [p.structured_outputs is not None for p in batch(0)]
    assert sum(structured) >= 12
