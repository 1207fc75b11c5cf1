"""Requests to an engine, and the order in which they come: alone, in turns, aborted, under a name that comes again."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine.engines import CACHE, ENGINE, PROMPTS, TARGET, V2

LENGTH = 16 if V2 else 32
"""Tokens of an answer, unless a row says otherwise; the interpreter is slow."""


@dataclass(frozen=True)
class Cut:
    """A prompt of so many tokens."""

    length: int
    start: int = 0

    def ids(self) -> list[int]:
        return (_text() * (1 + (self.start + self.length) // len(_text())))[self.start : self.start + self.length]


@cache
def _text() -> list[int]:
    return get_tokenizer(TARGET).encode("\n\n".join(PROMPTS))


class Request(NamedTuple):
    prompt: str | Cut
    params: dict[str, Any]
    """Arguments of `SamplingParams`; a grammar as those of `StructuredOutputsParams`."""
    leaves: int = 0
    """Outputs after which it is aborted, and the next one of its session comes at once."""
    priority: int = 0
    turn: bool = False
    """True if its prompt follows the answer before it."""


class InTurn(tuple[Any, ...]):
    """Values of a parameter, for one request after the other."""


def in_turn(*values: Any) -> InTurn:
    return InTurn(values)


def ask(prompts: Iterable[str | Cut], **params: Any) -> list[Request]:
    """One request a prompt; greedy, and as long as it may be, unless the parameters say otherwise."""
    found = []
    for i, prompt in enumerate(prompts):
        own = {name: one[i % len(one)] if isinstance(one, InTurn) else one for name, one in params.items()}
        request = {name: own.pop(name) for name in ("leaves", "priority", "turn") if name in own}
        own = {"temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, **own}
        if own["temperature"] > 0:
            own.setdefault("seed", i)
        found.append(Request(prompt, own, **request))
    return found


class Answer(NamedTuple):
    prompt: list[int]
    completions: list[Any]
    cached: int
    """Tokens of the prompt that were in the prefix cache."""
    left: bool
    """True if it was aborted."""
    fixed: bool
    """True if it has one right answer: it is greedy or has a seed."""
    prompt_logprobs: Any


Conversation = Sequence[Request | list[Request]]
"""A list is a session: its requests come one after the other under one name."""


class Session:
    """Requests that come one after the other under one name, and their answers."""

    def __init__(self, requests: Request | list[Request], tokenizer: Any, compared: bool):
        self.requests = [requests] if isinstance(requests, Request) else requests
        self.tokenizer, self.compared = tokenizer, compared
        self.answers: list[Answer] = []
        self.outputs = 0

    @property
    def request(self) -> Request:
        return self.requests[len(self.answers)]

    @property
    def over(self) -> bool:
        return len(self.answers) == len(self.requests)

    def prompt(self) -> Any:
        own = self.request.prompt
        ids = own.ids() if isinstance(own, Cut) else self.tokenizer.encode(own)
        if self.request.turn:
            last = self.answers[-1]
            ids = [*last.prompt, *last.completions[0].token_ids, *ids]
        return {"prompt_token_ids": ids}

    def params(self) -> SamplingParams:
        own = dict(self.request.params)
        if own.get("structured_outputs"):
            own["structured_outputs"] = StructuredOutputsParams(**own["structured_outputs"])
        if self.compared and own.get("logprobs") is None:
            own["logprobs"] = 2
        kind = RequestOutputKind.CUMULATIVE if self.request.leaves else RequestOutputKind.FINAL_ONLY
        return SamplingParams(output_kind=kind, **own)

    def take(self, output: Any) -> bool:
        """Take an output; returns whether the request has to be aborted now."""
        self.outputs += 1
        left = not output.finished and self.outputs == self.request.leaves
        if output.finished or left:
            self.outputs = 0
            fixed = self.request.params["temperature"] == 0 or self.request.params["seed"] is not None
            prompt, cached = list(output.prompt_token_ids), output.num_cached_tokens
            self.answers.append(Answer(prompt, output.outputs, cached, left, fixed, output.prompt_logprobs))
        return left


def _sessions(asked: Conversation, tokenizer: Any, compared: bool = False) -> dict[str, Session]:
    return {f"request {i}": Session(one, tokenizer, compared) for i, one in enumerate(asked)}


def serve(llm: Any, asked: Conversation, *, fresh: bool, compared: bool = False) -> list[Answer]:
    """Serve the requests in this process, and check that all blocks are freed. `fresh`: nothing is in the prefix cache;
    `compared`: with the logprobs that tell a tie."""
    if fresh:
        assert llm.reset_prefix_cache()
    engine, sessions = llm.llm_engine, _sessions(asked, llm.get_tokenizer(), compared)
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()

    def begin(name: str) -> None:
        session = sessions[name]
        engine.add_request(name, session.prompt(), session.params(), priority=session.request.priority)

    for name in sessions:
        begin(name)
    while engine.has_unfinished_requests():
        for output in engine.step():
            session, answered = sessions[output.request_id], len(sessions[output.request_id].answers)
            if session.take(output):
                engine.abort_request([output.request_id], internal=False)
            if len(session.answers) > answered and not session.over:
                begin(output.request_id)
    while scheduler.has_requests():
        engine.step()
    assert pool.get_num_free_blocks() == free, "blocks are lost"
    return [answer for session in sessions.values() for answer in session.answers]


class Server:
    """`AsyncLLM` in this process, its engine in another."""

    def __init__(self, spec: dict[str, Any], arguments: dict[str, Any]):
        given = {"model": TARGET, "kv_cache_memory_bytes": CACHE, **ENGINE, **arguments}
        spec = {**spec, "tree": {"cost_profile": None, **spec["tree"]}}
        self.loop = asyncio.new_event_loop()
        self.engine = self.loop.run_until_complete(self._start(AsyncEngineArgs(speculative_config=spec, **given)))

    async def _start(self, arguments: AsyncEngineArgs) -> AsyncLLM:
        return AsyncLLM.from_engine_args(arguments)

    def serve(self, asked: Conversation, *, fresh: bool) -> list[Answer]:
        return self.loop.run_until_complete(self._serve(asked, fresh))

    async def _serve(self, asked: Conversation, fresh: bool) -> list[Answer]:
        if fresh:
            await self.engine.reset_prefix_cache()
        sessions = _sessions(asked, get_tokenizer(TARGET))
        await asyncio.gather(*(self._converse(name, session) for name, session in sessions.items()))
        return [answer for session in sessions.values() for answer in session.answers]

    async def _converse(self, name: str, session: Session) -> None:
        while not session.over:
            outputs = self.engine.generate(
                session.prompt(), session.params(), request_id=name, priority=session.request.priority
            )
            async for output in outputs:
                if session.take(output):
                    break
            await outputs.aclose()

    def shutdown(self) -> None:
        self.engine.shutdown()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
