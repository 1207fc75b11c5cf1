"""Streams of vLLM's parsers without an engine: the input of its front end, step by step."""

import copy
import json
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from tests.config.replies import MARKERS
from tests.engine.engines import TARGET
from vllm_adaptive_tree.engine import patches
from vllm_adaptive_tree.engine.names import STREAMS

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
THINKING = {"thinking": True, "enable_thinking": True, "reasoning_effort": "high"}
STOCK = SimpleNamespace(max_model_len=4096, hf_overrides=None, hf_config=SimpleNamespace(model_type="llama"))
OURS = copy.copy(STOCK)
setattr(OURS, STREAMS, {})
"""The model's configuration as a parser gets it, of vLLM without us and of a tree method."""


Step = tuple[str, list[int], bool]
"""Text, tokens, and True at the end."""


@cache
def tokenizer() -> Any:
    """The bundled pair's, with the markers of all replies."""
    found = AutoTokenizer.from_pretrained(TARGET)
    found.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in dict.fromkeys(MARKERS)])
    return found


def ids_of(text: str) -> list[int]:
    ids: list[int] = tokenizer()(text, add_special_tokens=False).input_ids
    return ids


def chat(**fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "x"}]
    return ChatCompletionRequest(model="x", messages=messages, tools=[TOOL], stream=True, **fields)


def parser(kind: str, name: str, model_config: Any = STOCK) -> Any:
    patches.install()
    names = {"reasoning_parser_name": None, "tool_parser_name": None, f"{kind}_parser_name": name}
    cls: Any = ParserManager.get_parser(enable_auto_tools=True, model_name="x", **names)
    return cls(tokenizer(), chat().tools, chat_template_kwargs=THINKING, model_config=model_config)


def steps(tokenizer: Any, request: Any, ids: list[int], size: int, prompt: list[int]) -> Iterator[Step]:
    """Steps of these tokens as the engine's output processor sends them, `size` tokens each."""
    params = request.to_sampling_params(4096, {})
    fields = SimpleNamespace(request_id="x", sampling_params=params, prompt_token_ids=prompt, prompt_embeds=None)
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, fields)
    for at in range(0, len(ids), size):
        before = detokenizer.num_output_tokens()
        stopped = detokenizer.update(ids[at : at + size], stop_terminated=False)
        step = ids[at : at + detokenizer.num_output_tokens() - before]
        end = stopped is not None or at + size >= len(ids)
        yield detokenizer.get_next_output_text(end, delta=True), step, end
        if end:
            return


Answer = tuple[str, str, list[tuple[str, Any]]]
"""Reasoning, content, and name and arguments of each call."""


def streamed(parser: Any, ids: list[int], size: int, request: Any = None, prompt: list[int] | None = None) -> Answer:
    request = request or chat()
    prompt = prompt or ids_of("x")
    reasoning = content = ""
    calls: dict[int, list[str]] = {}
    for delta_text, step, end in steps(parser.model_tokenizer, request, ids, size, prompt):
        delta = parser.parse_delta(delta_text, step, request, prompt, finished=end)
        if delta is None:
            continue
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        for call in delta.tool_calls:
            parts = calls.setdefault(call.index, ["", ""])
            if call.function is not None:
                parts[0] += call.function.name or ""
                parts[1] += call.function.arguments or ""
    return reasoning, content, [(name, _loaded(arguments)) for _, (name, arguments) in sorted(calls.items())]


def whole(parser: Any, text: str) -> Answer:
    """Answer that is not streamed."""
    reasoning, content, calls = parser.parse(text, chat(), enable_auto_tools=True, model_output_token_ids=ids_of(text))
    return reasoning or "", content or "", [(call.name, _loaded(call.arguments)) for call in calls or ()]


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
