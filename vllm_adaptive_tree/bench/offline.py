"""An engine without a server, stepped here; runs inside a process of its own (`process.py`)."""

import logging
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_adaptive_tree.bench.arrivals import Arrivals, Counters, measurement, peak_memory
from vllm_adaptive_tree.bench.loads import load, phase_prompts
from vllm_adaptive_tree.bench.others import Others
from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.repair import repair_sampling
from vllm_adaptive_tree.bench.rounds import Measurement

SWINGS = 2
"""Of a round: so often from one request to many."""
FIRST_STEPS = 64
"""Of an engine that begins cold, or warm."""
LONGER = 4
"""Times as long are the requests of a swing: otherwise most of a burst would be the reading of prompts."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all engines of a run have in common."""

    model: str
    dtype: str
    eager: bool
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_tokens: int  # new tokens of a request, exactly
    swing_seconds: float  # of one phase
    prompts: tuple[str, ...]
    waves: int | None = None  # requests of a round for each that runs at a time, where it is not the default

    def arguments(self) -> dict[str, Any]:
        """Of vLLM's engine; every round shall do the same work, so no prefix is cached."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "enforce_eager": self.eager,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": False,
        }


class Offline:
    def __init__(self, config: Config, setup: Setup):
        logging.getLogger("vllm").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning)
        from vllm import LLM

        from vllm_adaptive_tree.amx import allow_amx

        allow_amx()
        self.setup = setup
        self.llm: Any = LLM(
            speculative_config=config.speculation,
            disable_log_stats=False,
            use_tqdm_on_load=False,
            **setup.arguments(),
        )
        self.engine = self.llm.llm_engine
        self.repaired = config.role == "chain" and repair_sampling()
        self.started = 0  # requests so far, for their names
        encode = self.llm.get_tokenizer().encode
        room = setup.max_model_len - setup.max_tokens
        self.prompts = {prompt: encode(prompt)[-room:] for prompt in setup.prompts}

    def measure(self, cell: Cell, number: int) -> Measurement:
        if cell.place == "swing":
            found = self._swing(cell, number)
        elif cell.place == "first":
            found = self._first(cell, number)
        else:
            found = self._steady(cell, load(self.setup.prompts, cell.concurrency, number, self.setup.waves))
        return replace(found, repaired=self.repaired and cell.sampled)

    def _steady(self, cell: Cell, prompts: Sequence[str]) -> Measurement:
        """A request that ends makes room for the next."""
        before, others, began = self._counters(), Others([os.getpid()]), time.perf_counter()
        running: dict[str, Arrivals] = {}
        requests: list[Arrivals] = []
        while running or len(requests) < len(prompts):
            wanted = min(cell.concurrency, len(running) + len(prompts) - len(requests))
            for name in self._top_up(running, wanted, iter(prompts[len(requests) :]), cell):
                requests.append(running[name])
            self._step(running)
        counted, seconds = self._counters().since(before), time.perf_counter() - began
        return measurement(requests, seconds, counted, peak_memory([os.getpid()]), others.cores())

    def _first(self, cell: Cell, number: int) -> Measurement:
        """The engine's next steps after the prompts of one batch are read, whatever they bring."""
        prompts = load(self.setup.prompts, cell.concurrency, number, 1)
        running: dict[str, Arrivals] = {}
        self._top_up(running, cell.concurrency, iter(prompts), cell)
        while not all(one.steps for one in running.values()):
            self._step(running)
        before, others, began, tokens = self._counters(), Others([os.getpid()]), time.perf_counter(), 0
        for _ in range(FIRST_STEPS):
            tokens += self._step(running)
        seconds = time.perf_counter() - began
        self.engine.abort_request(list(running))
        counted = self._counters().since(before)
        found = measurement(running.values(), seconds, counted, peak_memory([os.getpid()]), others.cores())
        return replace(found, tokens=tokens, outputs=[])

    def _swing(self, cell: Cell, number: int) -> Measurement:
        """Few and many requests in turn; a request that ends makes room for the next, what is too many is aborted."""
        before, others, began = self._counters(), Others([os.getpid()]), time.perf_counter()
        running: dict[str, Arrivals] = {}
        requests: list[Arrivals] = []
        swing: dict[str, list[float]] = {"1": [0, 0.0], str(cell.concurrency): [0, 0.0]}
        for phase, wanted in enumerate([1, cell.concurrency] * SWINGS, start=2 * SWINGS * number):
            prompts = phase_prompts(self.setup.prompts, cell.concurrency, phase)
            surplus = list(running)[wanted:]
            self.engine.abort_request(surplus)
            for name in surplus:
                del running[name]
            tokens, phase_began = 0, time.perf_counter()
            while time.perf_counter() - phase_began < self.setup.swing_seconds:
                for name in self._top_up(running, wanted, prompts, cell):
                    requests.append(running[name])
                tokens += self._step(running)
            swing[str(wanted)][0] += tokens
            swing[str(wanted)][1] += time.perf_counter() - phase_began
        self.engine.abort_request(list(running))
        counted = self._counters().since(before)
        seconds = time.perf_counter() - began
        return measurement(requests, seconds, counted, peak_memory([os.getpid()]), others.cores(), swing)

    def _top_up(self, running: dict[str, Arrivals], wanted: int, prompts: Iterator[str], cell: Cell) -> list[str]:
        names = [self._add(next(prompts), cell) for _ in range(wanted - len(running))]
        running.update((name, Arrivals()) for name in names)
        return names

    def _add(self, prompt: str, cell: Cell) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = self.llm.get_default_sampling_params().clone() if cell.sampled else SamplingParams(temperature=0.0)
        tokens = self.prompts[prompt]
        params.max_tokens, params.ignore_eos = self.setup.max_tokens, True
        if cell.place == "first":
            params.max_tokens = self.setup.max_model_len - len(tokens)
        if cell.place == "swing":
            params.max_tokens = min(LONGER * self.setup.max_tokens, self.setup.max_model_len - len(tokens))
        params.output_kind, params.detokenize = RequestOutputKind.DELTA, False
        self.started += 1
        name = str(self.started)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def _step(self, running: dict[str, Arrivals]) -> int:
        """The number of tokens that it brought; finished requests leave `running`."""
        outputs, count = self.engine.step(), 0
        now = time.perf_counter()
        for output in outputs:
            tokens = output.outputs[0].token_ids
            if output.request_id in running and tokens:
                running[output.request_id].add(tokens, now)
                count += len(tokens)
            if output.finished:
                running.pop(output.request_id, None)
        return count

    def _counters(self) -> Counters:
        return Counters.read(self._samples())

    def _samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Named as a server names them."""
        for metric in self.llm.get_metrics():
            if hasattr(metric, "sum"):  # a histogram
                yield f"{metric.name}_sum", metric.labels, metric.sum
                yield f"{metric.name}_count", metric.labels, metric.count
            elif hasattr(metric, "value"):
                yield f"{metric.name}_total", metric.labels, metric.value
