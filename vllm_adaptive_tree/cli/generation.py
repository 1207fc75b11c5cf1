"""One engine, driven step by step, so that it is known which tokens arrived together."""

import logging
import statistics
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from typing import Any

from vllm_adaptive_tree.report.tokens import Span, spans

Steps = list[list[int]]  # of one request: per step, the token ids that arrived

MAX_MODEL_LEN = 1024
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    model: str
    speculative_config: dict[str, Any] | None
    prompts: tuple[str, ...]
    max_tokens: int
    rounds: int  # the same generation again, for a steadier time


@dataclass(frozen=True, slots=True)
class Generation:
    rounds: list[list[Steps]]  # [round][request]
    seconds: list[float]  # [round]
    cpu_seconds: list[float]  # [round], of the engine's process
    counters: dict[str, int]  # vLLM's own, over all rounds: drafts, draft_tokens, accepted_tokens
    texts: list[str]  # [request]
    spans: list[list[Span]]  # [request], without the last step, which `max_tokens` may have cut
    vllm_version: str

    @property
    def tokens(self) -> list[list[list[int]]]:  # [round][request][token]
        return [[_flat(steps) for steps in requests] for requests in self.rounds]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens[0])) / statistics.median(self.seconds)

    @property
    def core_share(self) -> float:
        """Well below 1 where the engine had to wait for a core: then `seconds` measure the other programs."""
        return sum(self.cpu_seconds) / sum(self.seconds)

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.counters["accepted_tokens"] / max(1, self.counters["drafts"])

    @property
    def nodes_per_step(self) -> float:
        return self.counters["draft_tokens"] / max(1, self.counters["drafts"])

    def check_counters(self, nodes: int) -> None:
        """vLLM's counters against the tokens that arrived. A request's first step is its prefill; its last may have
        been cut at `max_tokens`, after the accepted tokens were counted.

        Raises RuntimeError where they contradict each other.
        """
        requests = [steps for round_ in self.rounds for steps in round_]
        decode_steps = sum(len(steps) - 1 for steps in requests)
        accepted = sum(len(step) - 1 for steps in requests for step in steps)
        cut = sum(nodes + 1 - len(steps[-1]) for steps in requests)
        drafts, counted = self.counters["drafts"], self.counters["accepted_tokens"]
        if drafts > decode_steps or not accepted <= counted <= accepted + cut:
            raise RuntimeError(
                f"vLLM counted {drafts} drafts and {counted} accepted tokens, but {decode_steps} decode steps with "
                f"{accepted} tokens beyond the first arrived (at most {cut} may have been cut)"
            )


def generate(job: Job) -> Generation:
    """Run `job` in a process of its own, which takes the engine with it when it ends."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_generate, job).result()


def _generate(job: Job) -> Generation:
    logging.getLogger("vllm").setLevel(logging.ERROR)  # what is logged before vLLM configures its logging
    warnings.filterwarnings("ignore", category=FutureWarning)
    import vllm

    llm = vllm.LLM(
        model=job.model,
        speculative_config=job.speculative_config,
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,  # every round does the same work
        disable_log_stats=False,
        use_tqdm_on_load=False,
    )
    nodes = job.speculative_config["num_speculative_tokens"] if job.speculative_config else 0
    rounds, seconds, cpu_seconds = [], [], []
    _round(llm, job.prompts[:1], max_tokens=16)  # warm-up

    from tqdm import tqdm  # type: ignore[import-untyped]

    before = _counters(llm)
    total = job.rounds * len(job.prompts) * job.max_tokens
    with tqdm(total=total, desc=job.name, unit="tok", disable=None) as bar:
        for _ in range(job.rounds):
            requests, elapsed, cpu = _round(llm, job.prompts, max_tokens=job.max_tokens, bar=bar)
            rounds.append(requests)
            seconds.append(elapsed)
            cpu_seconds.append(cpu)
    counters = {name: count - before[name] for name, count in _counters(llm).items()}

    tokenizer = llm.get_tokenizer()

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    generation = Generation(
        rounds=rounds,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        counters=counters,
        texts=[decode(_flat(steps)) for steps in rounds[0]],
        spans=[spans(steps[:-1], decode) for steps in rounds[0]],
        vllm_version=vllm.__version__,
    )
    generation.check_counters(nodes)
    return generation


def _round(llm: Any, prompts: tuple[str, ...], *, max_tokens: int, bar: Any = None) -> tuple[list[Steps], float, float]:
    """All prompts as one greedy batch: their steps; seconds and CPU seconds of the stepping alone."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
    )
    engine = llm.llm_engine
    steps: list[Steps] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, parameters)
    started, cpu_started = time.perf_counter(), time.process_time()
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            steps[int(output.request_id)].append(tokens)
            if bar is not None:
                bar.update(len(tokens))
    return steps, time.perf_counter() - started, time.process_time() - cpu_started


def _flat(steps: Steps) -> list[int]:
    return list(chain.from_iterable(steps))


def _counters(llm: Any) -> dict[str, int]:
    """vLLM's speculation counters so far; zeros where it runs without speculation."""
    counts = dict.fromkeys(COUNTERS.values(), 0)
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            counts[COUNTERS[metric.name]] += int(metric.value)
    return counts
