"""Sessions of streaming input: requests that get more input after each of their turns."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind


class Turn(NamedTuple):
    tokens: list[int]  # of the new input
    params: SamplingParams


class Answer(NamedTuple):
    tokens: list[int]
    reason: str


def run(llm: Any, sessions: list[list[Turn]]) -> list[list[Answer]]:
    """The answers of each session. All sessions have begun a turn before any step of it."""
    engine = llm.llm_engine
    core, process = engine.engine_core, engine.input_processor.process_inputs
    answers: list[list[Answer]] = [[] for _ in sessions]
    for at in range(max(map(len, sessions))):
        running = {}
        for number, turns in enumerate(sessions):
            if at < len(turns):
                name, turn = f"session-{number}", turns[at]
                prompt = {"prompt_token_ids": list(turn.tokens)}  # vLLM extends it
                core.add_request(
                    process(name, prompt, turn.params, supported_tasks=engine.get_supported_tasks(), resumable=True)
                )
                running[name] = number
                answers[number].append(Answer([], ""))
        while running:
            for output in core.get_output().outputs:
                answer = answers[running[output.request_id]][-1]
                answer.tokens.extend(output.new_token_ids)
                if output.finish_reason is not None:
                    answers[running.pop(output.request_id)][-1] = answer._replace(reason=str(output.finish_reason))
    core.abort_requests([f"session-{number}" for number in range(len(sessions))])
    core.get_output()
    return answers


def random_sessions(prompts: list[list[int]], turns: int, stops: list[int], *, seed: int) -> list[list[Turn]]:
    """Sessions of `turns` turns each, of one token or some of another prompt's. Every second session is sampled, with a
    seed; answers end at `stops`, or after some tokens."""
    pick = random.Random(seed)
    sessions = []
    for number, prompt in enumerate(prompts):
        session = []
        for at in range(turns):
            tokens = prompt if at == 0 else pick.choice(prompts)[: pick.choice([1, 2, 9, 40])]
            params = SamplingParams(
                temperature=0.8 * (number % 2),
                seed=number if number % 2 else None,
                max_tokens=pick.randint(1, 18),
                min_tokens=pick.choice([0, 0, 1]),
                stop_token_ids=stops,
                ignore_eos=True,
            )
            session.append(Turn(tokens, params))
        sessions.append(session)
    return sessions


async def stream(engine: Any, name: str, turns: list[Turn]) -> list[Answer]:
    """One session through `AsyncLLM.generate`; each turn is sent when the one before it has ended."""
    answered, answers, tokens = asyncio.Event(), list[Answer](), list[int]()

    async def inputs() -> AsyncIterator[StreamingInput]:
        for turn in turns:
            params = turn.params.clone()
            params.output_kind = RequestOutputKind.DELTA
            yield StreamingInput(prompt={"prompt_token_ids": list(turn.tokens)}, sampling_params=params)
            await answered.wait()
            answered.clear()

    first = SamplingParams(output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(inputs(), first, name):
        tokens.extend(output.outputs[0].token_ids)
        if (reason := output.outputs[0].finish_reason) is not None:
            answers.append(Answer(tokens, str(reason)))
            tokens = []
            answered.set()
    return answers
