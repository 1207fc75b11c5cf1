"""Streams of a server with reasoning and tool parsers, with a tree method: what is not streamed, and vLLM's own."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.parser import ParserManager
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.async_llm import AsyncLLM

from tests.config.streams import Answer, streamed
from tests.engine.engines import ENGINE, PAIR, PROMPTS, Engines, tree
from vllm_adaptive_tree.engine.names import STREAMS

TOKENS = 40
PARSERS = ("deepseek_r1", "ernie45")
RENAMED = {"self": "<think>", "):": "</think>"}
"""Tokens that the bundled pair writes often, and what they are called here."""
BIAS = {"276": 4.0, "312": 4.0}
"""They come more often."""
STOP = ["never comes", "os.fspath"]
IDS = [5, 262, 300]
NUMBER = {"type": "object", "properties": {"a": {"enum": [12]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": NUMBER, "strict": True}}]


def renamed(part: str, folder: Path) -> str:
    """A copy of the pair's target or draft with `RENAMED`."""
    copy = folder / part
    shutil.copytree(PAIR / part, copy)
    file = copy / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    model = tokenizer["model"]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    model["merges"] = [[a, b] for a, b in merges if not {a, b, a + b} & RENAMED.keys()]
    for old, new in RENAMED.items():
        model["vocab"][new] = model["vocab"].pop(old)
    file.write_text(json.dumps(tokenizer))
    return str(copy)


def messages(prompt: str) -> list[Any]:
    return [{"role": "user", "content": prompt}]


def body(prompt: str = PROMPTS[3], **fields: Any) -> dict[str, Any]:
    own = {"model": "demo", "messages": messages(prompt), "max_completion_tokens": TOKENS, "temperature": 0}
    return {**own, "ignore_eos": True, "logit_bias": BIAS, **fields}


class Server:
    """The serving classes of vLLM's OpenAI server over one engine, with any parsers."""

    def __init__(self, engine: AsyncLLM, model: str) -> None:
        self.engine = engine
        self.models = OpenAIServingModels(engine, [BaseModelPath(name="demo", model_path=model)])

    def serving(self, cls: Any, *role: str, reasoning: str = "", tool: str | None = None) -> Any:
        parsers = {"enable_auto_tools": tool is not None, "reasoning_parser": reasoning, "tool_parser": tool}
        template = {"request_logger": None, "chat_template": None, "chat_template_content_format": "auto"}
        renderer = OnlineRenderer(self.engine.model_config, self.engine.renderer, **template, **parsers)
        return cls(self.engine, self.models, *role, online_renderer=renderer, **template, **parsers)

    async def chat(self, body: dict[str, Any], **parsers: Any) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
        """An answer that is not streamed, one that is, and its chunks."""
        serving = self.serving(OpenAIServingChat, "assistant", **parsers)
        stream = {"stream": True, "stream_options": {"include_usage": True}, **body}
        body = {name: value for name, value in body.items() if name != "stream_options"}
        answer = await serving.create_chat_completion(ChatCompletionRequest(**body))
        chunks = []
        async for line in await serving.create_chat_completion(ChatCompletionRequest(**stream)):
            if (data := line.removeprefix("data: ").strip()) != "[DONE]":
                chunks.append(json.loads(data))
        return summary(answer.model_dump()), joined(chunks), chunks

    async def responses(self, prompt: str, **parsers: Any) -> tuple[Any, Any, Any]:
        """Items that are not streamed, those that end in a stream, and the texts that were streamed."""
        serving = self.serving(OpenAIServingResponses, **parsers)
        fields: dict[str, Any] = {"model": "demo", "input": prompt, "max_output_tokens": TOKENS, "temperature": 0}
        fields |= {"ignore_eos": True, "logit_bias": BIAS}
        answer = await serving.create_responses(ResponsesRequest(**fields))
        events = [event async for event in await serving.create_responses(ResponsesRequest(stream=True, **fields))]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        texts = "".join(event.delta for event in events if event.type.endswith("text.delta"))
        return texts_of(answer.output), texts_of(done), texts

    async def messages(self, prompt: str, **parsers: Any) -> tuple[str, str]:
        """Reasoning and content of a stream of the Messages API."""
        serving = self.serving(AnthropicServingMessages, "assistant", **parsers)
        request = AnthropicMessagesRequest(
            model="demo", messages=messages(prompt), max_tokens=TOKENS, temperature=0, stream=True
        )
        found = {"thinking": "", "text": ""}
        async for event in await serving.create_messages(request):
            _, _, data = event.partition("data: ")
            delta = json.loads(data).get("delta", {})
            if (kind := delta.get("type", "").removesuffix("_delta")) in found:
                found[kind] += delta[kind]
        return found["thinking"], found["text"]


def texts_of(items: list[Any]) -> list[tuple[str, str]]:
    return [(item.type, item.content[0].text) for item in items]


def summary(answer: dict[str, Any]) -> dict[str, Any]:
    """Parts of an answer that a stream has, too."""
    assert "choices" in answer, answer
    choices = []
    for choice in answer["choices"]:
        message = choice["message"]
        choices.append(
            {
                "reasoning": message["reasoning"] or "",
                "content": message["content"] or "",
                "calls": [
                    (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
                ],
                "logprobs": (choice["logprobs"] or {}).get("content") or [],
                "tokens": choice["token_ids"] or [],
                "finish_reason": choice["finish_reason"],
                "stop_reason": choice["stop_reason"],
            }
        )
    return {"choices": choices, "usage": answer["usage"]}


def joined(chunks: list[Any]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            own = choices.setdefault(
                choice["index"], {"reasoning": "", "content": "", "calls": [], "logprobs": [], "tokens": [], "ids": {}}
            )
            delta = choice["delta"]
            own["reasoning"] += delta.get("reasoning") or ""
            own["content"] += delta.get("content") or ""
            own["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            own["tokens"] += choice.get("token_ids") or []
            for call in delta.get("tool_calls") or ():
                name, arguments = own["ids"].get(call["index"], ("", ""))
                function = call["function"]
                own["ids"][call["index"]] = (
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                )
            if choice["finish_reason"] is not None:
                own |= {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
    for own in choices.values():
        own["calls"] = list(own.pop("ids").values())
    return {"choices": [choices[index] for index in sorted(choices)], "usage": chunks[-1]["usage"]}


def requests() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Bodies and parsers, by name."""
    r1 = {"reasoning": "deepseek_r1"}
    tools = {**r1, "tool": "hermes"}
    grammar: dict[str, Any] = {"ignore_eos": False, "logit_bias": None, "max_completion_tokens": 60}
    named = {"type": "function", "function": {"name": "add"}}
    own = {
        "logprobs": (body(logprobs=True, top_logprobs=3), r1),
        "logprob_token_ids": (body(logprobs=True, logprob_token_ids=IDS), r1),
        "stop": (body(stop=STOP), r1),
        "stop, included": (body(stop=STOP, include_stop_str_in_output=True), r1),
        "three": (body(n=3, seed=3, temperature=0.8), r1),
        "interval": (body(stream_interval=5), r1),
        "echo": (body(echo=True), r1),
        "hidden": (body(include_reasoning=False), r1),
        "continuous usage": (body(stream_options={"include_usage": True, "continuous_usage_stats": True}), r1),
        "no choice": (body(tools=TOOLS, tool_choice="none"), tools),
        "auto": (body(tools=TOOLS), tools),
        "required": (body(tools=TOOLS, tool_choice="required", **grammar), {"tool": "hermes"}),
        "named": (body(tools=TOOLS, tool_choice=named, **grammar), {"tool": "hermes"}),
        "no parser": (body(), {}),
        "token ids": (body(return_token_ids=True), r1),
    }
    unbiased: dict[str, Any] = {"ignore_eos": False, "logit_bias": None}
    own |= {f"unbiased {at}": (body(prompt, **unbiased), r1) for at, prompt in enumerate(PROMPTS)}
    each = {
        f"{parser} {at}": (body(prompt), {"reasoning": parser})
        for parser in PARSERS
        for at, prompt in enumerate(PROMPTS)
    }
    return own | each


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("renamed")
    return renamed("target", folder), renamed("draft", folder)


@pytest.fixture(scope="module")
def plain(engines: Engines, pair: tuple[str, str]) -> dict[str, Any]:
    """vLLM without speculation: streams of single tokens, what is not streamed, and logprobs of chosen tokens."""
    llm = engines.start(model=pair[0])
    bias = {int(token): value for token, value in BIAS.items()}
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logit_bias": bias}
    outputs = llm.chat([messages(one) for one in PROMPTS], SamplingParams(**greedy), use_tqdm=False)
    (chosen,) = llm.chat([messages(PROMPTS[3])], SamplingParams(logprob_token_ids=IDS, **greedy), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert {str(tokenizer.get_vocab()[name]) for name in RENAMED.values()} == BIAS.keys()
    engines.shutdown()

    def stream(name: str, output: Any, fields: dict[str, Any]) -> Answer:
        cls: Any = ParserManager.get_parser(reasoning_parser_name=name)
        request = ChatCompletionRequest(**fields)
        return streamed(cls(tokenizer), list(output.outputs[0].token_ids), 1, request, output.prompt_token_ids)

    found: dict[str, Any] = {}
    for parser in PARSERS:
        cls: Any = ParserManager.get_parser(reasoning_parser_name=parser)
        for at, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
            whole = cls(tokenizer).parse(output.outputs[0].text, ChatCompletionRequest(**body(prompt)))
            found[f"{parser} {at}"] = stream(parser, output, body(prompt))[:2], tuple(part or "" for part in whole[:2])
    for name in ("stop", "stop, included"):
        found[name] = stream("deepseek_r1", outputs[3], requests()[name][0])[:2]
    found["logprob_token_ids"] = [[entry[token].logprob for token in IDS] for entry in chosen.outputs[0].logprobs]
    return found


@pytest.fixture(scope="module")
def answers(plain: dict[str, Any], pair: tuple[str, str]) -> dict[str, Any]:
    """All answers of one server: not streamed, streamed, and the chunks; and of one that feeds steps."""

    async def run() -> dict[str, Any]:
        arguments = {**ENGINE, "speculative_config": {**tree(12), "model": pair[1]}}
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=pair[0], **arguments))
        try:
            server = Server(engine, pair[0])
            asked = requests()
            # In one batch with it, vLLM answers other requests with alternatives of no probability.
            alone = asked.pop("logprob_token_ids")
            got = await asyncio.gather(*(server.chat(fields, **parsers) for fields, parsers in asked.values()))
            found: dict[str, Any] = dict(zip(asked, got, strict=True))
            found["logprob_token_ids"] = await server.chat(alone[0], **alone[1])
            items = (server.responses(prompt, reasoning="deepseek_r1") for prompt in PROMPTS[:5])
            found["responses"] = await asyncio.gather(*items)
            items = (server.messages(prompt, reasoning="deepseek_r1") for prompt in PROMPTS)
            found["messages"] = await asyncio.gather(*items)
            delattr(engine.model_config, STREAMS)
            steps = (server.chat(body(prompt), reasoning="ernie45") for prompt in PROMPTS)
            found["steps"] = await asyncio.gather(*steps)
            return found
        finally:
            engine.shutdown()

    return asyncio.run(run())


def parts(answer: dict[str, Any], choice: int = 0) -> tuple[str, str]:
    return answer["choices"][choice]["reasoning"], answer["choices"][choice]["content"]


@pytest.mark.parametrize("parser", PARSERS)
def test_a_stream_is_vllm_s_without_speculation(parser: str, answers: dict[str, Any], plain: dict[str, Any]) -> None:
    names = [f"{parser} {at}" for at in range(len(PROMPTS))]
    assert [parts(answers[name][1]) for name in names] == [plain[name][0] for name in names]
    assert [parts(answers[name][0]) for name in names] == [plain[name][1] for name in names]
    assert all(1 < len(answers[name][2]) < TOKENS for name in names)  # a chunk has several tokens


def test_without_it_streams_would_differ(answers: dict[str, Any], plain: dict[str, Any]) -> None:
    streams = [parts(stream) for _, stream, _ in answers["steps"]]
    assert sum(stream != plain[f"ernie45 {at}"][0] for at, stream in enumerate(streams)) > 2


def test_stop_strings(answers: dict[str, Any], plain: dict[str, Any]) -> None:
    for name in ("stop", "stop, included"):
        assert parts(answers[name][1]) == plain[name]
        assert answers[name][1]["choices"][0]["stop_reason"] == STOP[1]


SAME = (
    "three",
    "interval",
    "hidden",
    "continuous usage",
    "no choice",
    "auto",
    "required",
    "named",
    "no parser",
    "token ids",
)


@pytest.mark.parametrize("name", SAME)
def test_a_stream_is_what_is_not_streamed(name: str, answers: dict[str, Any]) -> None:
    whole, stream, _ = answers[name]
    assert stream["choices"] == whole["choices"]


def test_calls(answers: dict[str, Any]) -> None:
    for name in ("required", "named"):
        ((called, arguments),) = answers[name][1]["choices"][0]["calls"]
        assert (called, json.loads(arguments)) == ("add", {"a": 12})


def test_usage(answers: dict[str, Any]) -> None:
    """Reasoning is a part of what is generated (sgl-project/sglang#37450)."""
    counted = 0
    for name in requests():
        whole, stream, _ = answers[name]
        details = [answer["usage"].pop("completion_tokens_details", None) or {} for answer in (whole, stream)]
        reasoning = details[1].get("reasoning_tokens", 0)
        assert reasoning == details[0].get("reasoning_tokens", 0) <= stream["usage"]["completion_tokens"]
        assert stream["usage"].items() <= whole["usage"].items()
        counted += reasoning
    assert counted > 0


def test_logprobs_of_each_token(answers: dict[str, Any], plain: dict[str, Any]) -> None:
    """Each token of a chunk has its own alternatives (sgl-project/sglang#39260), and the chosen ones
    (vllm-project/vllm#44727)."""
    whole, stream = (answer["choices"][0]["logprobs"] for answer in answers["logprobs"][:2])
    assert [len(one["top_logprobs"]) for one in stream] == [3] * TOKENS
    for ours, theirs in zip(stream, whole, strict=True):
        assert [one["token"] for one in ours["top_logprobs"]] == [one["token"] for one in theirs["top_logprobs"]]
        for one, other in zip([ours, *ours["top_logprobs"]], [theirs, *theirs["top_logprobs"]], strict=True):
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
    assert len({json.dumps(one["top_logprobs"]) for one in stream}) > TOKENS / 2
    for answer in answers["logprob_token_ids"][:2]:
        found = [[other["logprob"] for other in one["top_logprobs"]] for one in answer["choices"][0]["logprobs"]]
        assert [one[-len(IDS) :] for one in found] == [
            pytest.approx(one, abs=1e-4) for one in plain["logprob_token_ids"]
        ]


def test_the_responses_api(answers: dict[str, Any], plain: dict[str, Any]) -> None:
    for at, (_, done, streamed_texts) in enumerate(answers["responses"]):
        reasoning, content = plain[f"deepseek_r1 {at}"][0]
        assert dict(done) == {kind: text for kind, text in (("reasoning", reasoning), ("message", content)) if text}
        assert streamed_texts == reasoning + content


def test_the_messages_api(answers: dict[str, Any]) -> None:
    streams = [parts(answers[f"unbiased {at}"][1]) for at in range(len(PROMPTS))]
    assert answers["messages"] == streams
    assert any(reasoning and content for reasoning, content in streams)


def test_token_ids(answers: dict[str, Any]) -> None:
    assert len(answers["token ids"][1]["choices"][0]["tokens"]) == TOKENS
