"""Every reasoning and tool parser of vLLM: a step of several tokens gives what its tokens give one by one."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.responses import serving
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from tests.config import replies
from tests.config.streams import OURS, STOCK, TOOL, chat, ids_of, parser, steps, streamed, tokenizer, whole
from vllm_adaptive_tree.engine.common.token_deltas import SWITCH, TokenDeltas, wanted

REPLIES = {"reasoning": replies.REASONING, "tool": replies.TOOLS}
REGISTERED = [
    *(("reasoning", name) for name in sorted(ReasoningParserManager.list_registered())),
    *(("tool", name) for name in sorted(ToolParserManager.list_registered())),
]

COHERE = "needs the package cohere_melody"
HF = "needs a tokenizer with a response template"
HARMONY = "stands for vLLM's HarmonyParser, which takes tokens one by one itself, and needs the vocabulary of gpt-oss"
UNBUILT = {
    ("reasoning", "beam"): HF,
    ("reasoning", "cohere_command3"): COHERE,
    ("reasoning", "cohere_command4"): COHERE,
    ("reasoning", "hf"): HF,
    ("reasoning", "openai_gptoss"): HARMONY,
    ("reasoning", "olmo3"): "needs pieces of its own vocabulary",
    ("tool", "beam"): HF,
    ("tool", "cohere_command3"): COHERE,
    ("tool", "cohere_command4"): COHERE,
    ("tool", "hf"): HF,
    ("tool", "openai"): HARMONY,
}
"""Parsers that cannot be built here."""

OTHER_WHOLE = {
    ("reasoning", "ernie45"): "leaves <response> in the content of a stream",
    ("reasoning", "granite"): "leaves the first word of the phrase that ends it in the reasoning of a stream",
    (
        "reasoning",
        "hunyuan_a13b",
    ): "knows markers by the token ids of its own vocabulary in a stream, by text otherwise",
    ("reasoning", "inkling"): "leaves <|end_message|> in the content of a stream",
    ("reasoning", "kimi_k3"): "leaves the markers of the response in the content of what is not streamed",
    ("tool", "functiongemma"): "writes broken JSON between two arguments of a stream",
    ("tool", "hunyuan_a13b"): "leaves <tool_calls> in the content of a stream",
    ("tool", "jamba"): "writes broken JSON where a string begins in a stream",
    ("tool", "minicpm5"): "leaves the call in the content of a stream",
    ("tool", "phi4_mini_json"): "streams no calls",
}
"""Parsers whose own stream of single tokens is not what is not streamed, and what they do."""


@pytest.mark.parametrize(("kind", "name"), [one for one in REGISTERED if one not in UNBUILT])
def test_a_step_is_its_tokens(kind: str, name: str) -> None:
    text = REPLIES[kind][name]
    ids = ids_of(text)
    by_token = streamed(parser(kind, name), ids, 1)
    assert {size: streamed(parser(kind, name, OURS), ids, size) for size in (1, 2, 3, 5, 1000)} == dict.fromkeys(
        (1, 2, 3, 5, 1000), by_token
    )
    assert (_trimmed(by_token) == _trimmed(whole(parser(kind, name), text))) == ((kind, name) not in OTHER_WHOLE)
    assert by_token != ("", text, []) or (kind, name) == ("reasoning", "hunyuan_a13b")


@pytest.mark.parametrize(("kind", "name"), [one for one in REGISTERED if one in UNBUILT])
def test_exceptions_cannot_be_built(kind: str, name: str) -> None:
    with pytest.raises((ImportError, KeyError, ValueError, NotImplementedError)):
        whole(parser(kind, name), REPLIES[kind][name])


def _trimmed(answer: tuple[str, str, list[Any]]) -> tuple[str, str, list[Any]]:
    """Without blanks around the content of an answer with calls: many parsers keep them in a stream only."""
    reasoning, content, calls = answer
    return reasoning, content.strip() if calls else content, calls


class Recorder:
    """The parser of a stream that takes down what it is fed with."""

    def __init__(self) -> None:
        self.fed: list[tuple[str, list[int], bool]] = []

    def __call__(self, text: str, ids: list[int], *_: Any, finished: bool) -> DeltaMessage | None:
        self.fed.append((text, ids, finished))
        return DeltaMessage(content=text)


FIELDS: list[dict[str, Any]] = [
    {},
    {"skip_special_tokens": False},
    {"stop": ["never comes"]},
    {"stop": ["never comes", "done"]},
    {"stop": ["🙂 do"], "include_stop_str_in_output": True},
    {"stop": ["step", "done"], "min_tokens": 20},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("size", [2, 3, 5, 1000])
def test_texts_are_those_of_single_tokens(size: int, fields: dict[str, Any]) -> None:
    """Characters of several tokens, and what is held back for a stop string, come with the token they came with."""
    request, prompt, ids = chat(**fields), ids_of("x"), ids_of(replies.REASONING["deepseek_r1"])
    recorder = Recorder()
    fed = TokenDeltas(recorder, tokenizer(), defaults={}, longest=4096)
    sent = list(steps(tokenizer(), request, ids, size, prompt))
    deltas = [fed(text, step, request, prompt, finished=end) for text, step, end in sent]
    assert recorder.fed == list(steps(tokenizer(), request, ids, 1, prompt))
    assert "🙂" in "".join(text for text, _, _ in recorder.fed)
    assert [delta.content if delta else None for delta in deltas] == [text for text, _, _ in sent]


def test_a_text_of_other_tokens_goes_on_whole() -> None:
    recorder, request = Recorder(), chat()
    fed = TokenDeltas(recorder, tokenizer(), defaults={}, longest=4096)
    fed("something", ids_of("import os"), request, None, finished=False)
    assert recorder.fed == [("something", ids_of("import os"), False)]


def items(size: int, *, parallel: bool, model_config: Any) -> list[Any]:
    """The items of the Responses API for calls with a text between them, streamed `size` tokens a step."""
    tools = [{"type": "function", **TOOL["function"]}]
    request = ResponsesRequest(input="x", tools=tools, parallel_tool_calls=parallel, stream=True)
    made, prompt = parser("tool", "qwen3_xml", model_config), ids_of("x")
    reply = f"First. {replies.QWEN}Then text.{replies.QWEN}"
    processor = SimpleStreamingEventProcessor(tools=request.tools)
    for text, ids, end in steps(tokenizer(), request, ids_of(reply), size, prompt):  # as OpenAIServingResponses does
        delta = made.parse_delta(text, ids, request, prompt, finished=end)
        if not delta:
            continue
        for part in serving.split_delta(maybe_filter_parallel_tool_calls(delta, request)):
            state, call = processor.resolve_target_state(part)
            if state.name == "NONE":
                continue
            if processor.needs_transition(state, call):
                processor.close_current()
                processor.open(state, call)
            processor.emit_delta(part, SimpleNamespace(logprobs=None), None)
    processor.close_current()
    return [
        (item.name, item.arguments) if item.type == "function_call" else item.content[0].text
        for item in processor.output_items
    ]


@pytest.mark.parametrize("parallel", [True, False])
def test_the_responses_api_keeps_the_order_of_a_step(parallel: bool) -> None:
    """A step may span the end of a call and a text, or two calls (vllm-project/vllm#55284)."""
    by_token = items(1, parallel=parallel, model_config=STOCK)
    assert [type(item) for item in by_token] == [str, tuple, str, tuple][: 4 if parallel else 3]
    for size in (1, 2, 3, 5, 12, 1000):
        assert items(size, parallel=parallel, model_config=OURS) == by_token


def test_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted()
    monkeypatch.setenv(f"VLLM_{SWITCH}", "off")  # its name in 0.1, and the one that Ray copies
    assert not wanted()
    monkeypatch.delenv(f"VLLM_{SWITCH}")
    monkeypatch.setenv(SWITCH, "off")
    assert not wanted()
    monkeypatch.setenv(SWITCH, "no")
    with pytest.raises(ValueError, match="it may be 'off'"):
        wanted()
