"""Engine without a server, stepped here; it runs inside a process of its own (`process.py`)."""

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from vllm_adaptive_tree.bench.background_load import BackgroundLoad
from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.request_timing import Counters, RequestTiming, measurement, peak_memory
from vllm_adaptive_tree.bench.rounds import Measurement
from vllm_adaptive_tree.bench.vllm_55005 import repair_sampling
from vllm_adaptive_tree.bench.workloads import mixed_length, prompt_indices, prompts_of_phase

MAX_MODEL_LEN = 1024
MIN_BATCHED_TOKENS = 512
"""Least tokens of a step: vLLM warms up with as many as it may have, and its default takes tens of seconds on a CPU."""
BURSTS = 2
"""Bursts per round of a bursty load."""
FIRST_STEPS = 64
"""Steps that are measured of an engine that starts cold, or warm."""
BURSTY_LENGTH = 4
"""Factor of the length of requests of a bursty load; otherwise most of a burst would be prefill."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings shared by all engines of a run."""

    model: str
    dtype: str
    eager: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_tokens: int  # new tokens of a request, exactly
    prompts: tuple[str, ...]
    max_model_len: int = MAX_MODEL_LEN
    phase_seconds: float = 0.0  # of a bursty load
    engine: Mapping[str, Any] = field(default_factory=dict)  # further arguments of vLLM's engine

    @classmethod
    def of(cls, configs: Sequence[Config], concurrency: int, **settings: Any) -> Self:
        """Setup that verifies every tree of `concurrency` requests in its full size."""
        nodes = max((one.speculation["num_speculative_tokens"] for one in configs if one.speculation), default=0)
        tokens = max(MIN_BATCHED_TOKENS, concurrency * (nodes + 2))
        return cls(max_num_seqs=concurrency, max_num_batched_tokens=tokens, **settings)

    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's engine. No prefix is cached, so that every round does the same work."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "enforce_eager": self.eager,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": False,
            **self.engine,
        }


class Offline:
    keep_tokens: ClassVar[bool] = False
    """True if measurements contain the tokens of every step, and not only their checksums."""

    def __init__(self, config: Config, setup: Setup):
        logging.getLogger("vllm").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning)
        import torch
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
        self.dtype: torch.dtype = self.engine.model_config.dtype
        self.repaired = config.role == "chain" and repair_sampling()
        self.started = 0  # requests so far, for their names
        encode = self.llm.get_tokenizer().encode
        room = setup.max_model_len - setup.max_tokens
        self.prompts = [encode(prompt)[-room:] for prompt in setup.prompts]

    def measure(self, cell: Cell, number: int) -> Measurement:
        measure = {"bursty": self._bursty, "first": self._first}.get(cell.place, self._steady)
        return replace(measure(cell, number), repaired=self.repaired and cell.sampled)

    def _steady(self, cell: Cell, number: int) -> Measurement:
        """Measure a steady load: a request that ends makes room for the next."""
        prompts = self._prompts_of_round(cell, number)
        running: dict[str, RequestTiming] = {}
        requests: list[RequestTiming] = []

        def run() -> None:
            while running or len(requests) < len(prompts):
                wanted = min(cell.concurrency, len(running) + len(prompts) - len(requests))
                requests.extend(self._top_up(running, wanted, iter(prompts[len(requests) :]), cell))
                self._step(running)

        return self._measured(run, requests)

    def _first(self, cell: Cell, number: int) -> Measurement:
        """Measure the first `FIRST_STEPS` steps after the prefill of one batch."""
        running: dict[str, RequestTiming] = {}
        self._top_up(running, cell.concurrency, iter(self._prompts_of_round(cell, number)), cell)
        while not all(one.steps for one in running.values()):
            self._step(running)
        requests, tokens = list(running.values()), 0

        def run() -> None:
            nonlocal tokens
            for _ in range(FIRST_STEPS):
                tokens += self._step(running)

        found = self._measured(run, requests)
        self.engine.abort_request(list(running))
        return replace(found, tokens=tokens, outputs=[])

    def _bursty(self, cell: Cell, number: int) -> Measurement:
        """Measure one request and many in turn. A request that ends makes room for the next; a surplus is aborted."""
        running: dict[str, RequestTiming] = {}
        requests: list[RequestTiming] = []
        totals: dict[str, list[float]] = {"1": [0, 0.0], str(cell.concurrency): [0, 0.0]}

        def run() -> None:
            for phase, wanted in enumerate([1, cell.concurrency] * BURSTS, start=2 * BURSTS * number):
                prompts = prompts_of_phase(range(len(self.prompts)), cell.concurrency, phase)
                surplus = list(running)[wanted:]
                self.engine.abort_request(surplus)
                for name in surplus:
                    del running[name]
                tokens, started = 0, time.perf_counter()
                while time.perf_counter() - started < self.setup.phase_seconds:
                    requests.extend(self._top_up(running, wanted, prompts, cell))
                    tokens += self._step(running)
                totals[str(wanted)][0] += tokens
                totals[str(wanted)][1] += time.perf_counter() - started
            self.engine.abort_request(list(running))

        return replace(self._measured(run, requests), outputs=[], bursty=totals)

    def _measured(self, run: Callable[[], None], requests: list[RequestTiming]) -> Measurement:
        """Measurement of `run`, which handles `requests` among others."""
        before, background, started = self._counters(), BackgroundLoad([os.getpid()]), time.perf_counter()
        run()
        counted, seconds = self._counters().since(before), time.perf_counter() - started
        memory, cores = peak_memory([os.getpid()]), background.cores()
        return measurement(requests, seconds, counted, memory, cores, keep_tokens=self.keep_tokens)

    def _prompts_of_round(self, cell: Cell, number: int) -> list[int]:
        return prompt_indices(cell, number, len(self.prompts))

    def _top_up(
        self, running: dict[str, RequestTiming], wanted: int, prompts: Iterator[int], cell: Cell
    ) -> list[RequestTiming]:
        """Start requests until `wanted` are running; returns the new ones."""
        new = {self._add(next(prompts), cell): RequestTiming() for _ in range(wanted - len(running))}
        running.update(new)
        return list(new.values())

    def _add(self, prompt: int, cell: Cell) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if cell.sampled and cell.temperature is None:
            params = self.llm.get_default_sampling_params().clone()
        else:
            params = SamplingParams(temperature=cell.temperature if cell.sampled else 0.0)
        tokens = self.prompts[prompt]
        usual, room = self.setup.max_tokens, self.setup.max_model_len - len(tokens)
        longer = {"first": room, "mixed": mixed_length(prompt, usual), "bursty": BURSTY_LENGTH * usual}
        params.max_tokens, params.ignore_eos = min(longer.get(cell.place, usual), room), True
        params.output_kind, params.detokenize = RequestOutputKind.DELTA, False
        self.started += 1
        name = str(self.started)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def _step(self, running: dict[str, RequestTiming]) -> int:
        """Run one step of the engine; returns the number of its tokens. Finished requests leave `running`."""
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
        """Samples of the metrics, under the names of a server's /metrics."""
        for metric in self.llm.get_metrics():
            if hasattr(metric, "sum"):  # a histogram
                yield f"{metric.name}_sum", metric.labels, metric.sum
                yield f"{metric.name}_count", metric.labels, metric.count
            elif hasattr(metric, "value"):
                yield f"{metric.name}_total", metric.labels, metric.value
