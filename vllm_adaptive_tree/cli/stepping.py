"""Engines that are driven step by step, so that it is known which tokens arrived together."""

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from threading import Thread
from types import TracebackType
from typing import Any, Self

from vllm_adaptive_tree.cli.generation import COUNTERS, About, Difference, Generation, Load, Steps, Turn, flat
from vllm_adaptive_tree.report.tokens import Span, spans

MAX_MODEL_LEN = 1024
MIN_BATCHED_TOKENS = 512
FLOAT32_TIE = 1e-5  # logits as close as this are a tie in any dtype


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine is started with."""

    name: str
    model: str
    speculative_config: dict[str, Any] | None
    dtype: str  # as vLLM's
    batch: int  # the most requests at a time
    cache_bytes: int | None = None  # for K/V; None: as the environment says

    @property
    def nodes(self) -> int:
        """The most tokens drafted per request and step."""
        return self.speculative_config["num_speculative_tokens"] if self.speculative_config else 0


class Engine:
    """An engine in a process of its own, which takes the engine with it when it ends."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._process = ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))

    def __enter__(self) -> Self:
        try:
            self.about = self._process.submit(_start, self.job).result()
        except BaseException:
            self._process.shutdown()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.shutdown()

    def decode(self, prompts: Sequence[str], max_tokens: int) -> Turn:
        return self._process.submit(_decode, tuple(prompts), max_tokens).result()

    def generation(self, rounds: list[list[Turn]], prompts: Sequence[str], reference: list[list[int]]) -> Generation:
        """`rounds` against the `reference`'s tokens of every prompt.

        Raises RuntimeError where vLLM's counters contradict the tokens that arrived.
        """
        requests = [steps for turn in rounds[0] for steps in turn.requests]
        texts, spans = self._process.submit(_read, requests).result()
        generation = Generation(rounds, texts, spans, self.about, [])
        generation.check_counters(self.job.nodes)
        for request, (prompt, theirs) in enumerate(zip(prompts, reference, strict=True)):
            found = [
                self._process.submit(_difference, request, prompt, tokens[request], theirs).result()
                for tokens in generation.tokens
                if tokens[request] != theirs
            ]
            generation.differences.extend(sorted(found, key=lambda difference: difference.margin)[-1:])
        return generation


def compare(
    engines: Sequence[Engine],
    load: Load,
    prompts: Sequence[str],
    max_tokens: int,
    reference: list[list[int]] | None,
    done: Callable[[int], object],
) -> list[Generation]:
    """One generation per engine. The engines take turns, so that what else the machine does falls on all of them.

    `reference`: tokens of every prompt, None: the first engine's; `done` is told how many tokens are new.
    """
    rounds: list[list[list[Turn]]] = [[] for _ in engines]
    for _ in range(load.rounds):
        for turns in rounds:
            turns.append([])
        for start in range(0, len(prompts), load.batch):
            group = prompts[start : start + load.batch]
            for engine, turns in zip(engines, rounds, strict=True):
                turns[-1].append(engine.decode(group, max_tokens))
                done(len(group) * max_tokens)
    if reference is None:
        reference = [flat(steps) for turn in rounds[0][0] for steps in turn.requests]
    return [engine.generation(turns, prompts, reference) for engine, turns in zip(engines, rounds, strict=True)]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Index of the first token that differs; both have as many tokens.

    Raises StopIteration where none does.
    """
    return next(at for at, (here, there) in enumerate(zip(ours, theirs, strict=True)) if here != there)


# -- in the engine's process

_llm: Any = None


def _end_with_parent() -> None:
    """A killed parent cannot shut its engines down, and they hold gigabytes."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _start(job: Job) -> About:
    global _llm
    Thread(target=_end_with_parent, daemon=True).start()
    logging.getLogger("vllm").setLevel(logging.ERROR)  # what is logged before vLLM configures its logging
    warnings.filterwarnings("ignore", category=FutureWarning)
    import torch
    import vllm

    from vllm_adaptive_tree.amx import allow_amx

    allow_amx()
    _llm = vllm.LLM(
        model=job.model,
        speculative_config=job.speculative_config,
        dtype=job.dtype,
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=job.batch,
        max_num_batched_tokens=max(MIN_BATCHED_TOKENS, (job.batch + 1) * (job.nodes + 2)),  # every tree in full size
        kv_cache_memory_bytes=job.cache_bytes,
        enable_prefix_caching=False,  # every round does the same work
        disable_log_stats=False,
        logprobs_mode="raw_logits",  # for `_difference`
        use_tqdm_on_load=False,
    )
    _decode(("import os",), 16)  # warm-up
    dtype = str(_llm.llm_engine.model_config.dtype).removeprefix("torch.")
    return About(vllm.__version__, dtype, torch.get_num_threads(), not vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING)


def _decode(prompts: tuple[str, ...], max_tokens: int) -> Turn:
    """All prompts as one greedy batch; the times are those of the stepping alone."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
    )
    engine, before = _llm.llm_engine, _counters()
    requests: list[Steps] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, parameters)
    started, cpu_started = time.perf_counter(), time.process_time()
    while engine.has_unfinished_requests():
        for output in engine.step():
            requests[int(output.request_id)].append(list(output.outputs[0].token_ids))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return Turn(requests, seconds, cpu_seconds, {name: count - before[name] for name, count in _counters().items()})


def _read(requests: Sequence[Steps]) -> tuple[list[str], list[list[Span]]]:
    tokenizer = _llm.get_tokenizer()

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    return [decode(flat(steps)) for steps in requests], [spans(steps[:-1], decode) for steps in requests]


def _difference(request: int, prompt: str, ours: list[int], theirs: list[int]) -> Difference:
    """What the target itself says where two texts of a prompt part.

    A near tie: both tokens' logits are no more than two of their dtype's steps below the best. The last bits depend on
    how many rows the forward has.
    """
    import torch
    from vllm import SamplingParams

    at = first_difference(ours, theirs)
    text = {"prompt_token_ids": [*_llm.get_tokenizer().encode(prompt), *ours[:at]]}
    output = _llm.generate([text], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20), use_tqdm=False)[0]
    logits = {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}
    best = max(logits.values())
    margin = best - min(logits.get(token, -math.inf) for token in (ours[at], theirs[at]))
    step = torch.finfo(_llm.llm_engine.model_config.dtype).eps * 2.0 ** (math.frexp(best)[1] - 1)
    return Difference(request, margin, near_tie=margin <= max(2 * step, FLOAT32_TIE))


def _counters() -> dict[str, int]:
    """vLLM's speculation counters so far; zeros where it runs without speculation."""
    counts = {f"vllm:spec_decode_num_{name}": 0 for name in COUNTERS}
    for metric in _llm.get_metrics():
        if metric.name in counts:
            counts[metric.name] += int(metric.value)
    return dict(zip(COUNTERS, counts.values(), strict=True))
