"""Thousands of short requests at changing concurrency on one engine, and conditions that must hold afterwards.

`python -m tests.engine.soak 10000 --out FILE` is the long form; test_soak.py runs a short one.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.engine.adapters import RANK, adapter
from tests.engine.engines import PROMPTS, TARGET, Engines, assert_identical, metric, runner_of, tree
from vllm_adaptive_tree.bench.provenance import save

SMALL = {"num_gpu_blocks_override": 28, "max_model_len": 256, "max_num_batched_tokens": 1024, "max_num_seqs": 32}
"""Blocks for about 20 requests, so that more preempt each other."""
CONCURRENCY = 1, 4, 40, 12
"""Numbers of concurrent requests, in turn."""
ABORTED = 0.15
GRAMMARS = (
    {"choice": ["yes", "no", "perhaps"]},
    {"regex": r"[0-9]{3}-[a-z]{4,12}"},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
)


class Request(NamedTuple):
    prompt: str
    params: SamplingParams
    lora: LoRARequest | None


def pool(folder: Path) -> list[Request]:
    """Requests of every sort; each has one right answer."""
    adapters = [
        LoRARequest(f"adapter {i}", i, adapter(folder / str(i), TARGET, seed=i, scale=0.02 * i)) for i in (1, 2)
    ]
    shared, found = PROMPTS[5] + PROMPTS[2], list[Request]()
    for i, prompt in enumerate(PROMPTS * 3):
        more: dict[str, Any] = {"temperature": 0.0}
        match i % 6:
            case 1:
                more = {"temperature": 0.8, "top_p": 0.95}
            case 2:
                more |= {"repetition_penalty": 1.2, "min_tokens": 4}
            case 3:
                more |= {"structured_outputs": StructuredOutputsParams(**GRAMMARS[i // 6 % 3])}
            case 4:
                more |= {"stop": ["return", "self"], "logprobs": 1}
        params = SamplingParams(seed=i, max_tokens=8 + 5 * (i % 7), output_kind=RequestOutputKind.FINAL_ONLY, **more)
        found.append(
            Request(shared + prompt if i % 4 == 0 else prompt, params, adapters[i % 2] if i % 5 == 0 else None)
        )
    return found


class Point(NamedTuple):
    """Sample in the middle of a soak."""

    ended: int
    concurrency: int
    memory: float
    """Resident memory, in MB."""
    free: int
    """Free blocks of the KV cache."""


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Soak:
    """An engine under load; `waves`: figures after each tenth of the requests, with no request in the engine; `points`:
    up to ten in each wave."""

    def __init__(self, llm: Any, requests: list[Request], references: list[Any]):
        self.engine, self.requests, self.references = llm.llm_engine, requests, references
        self.llm = llm
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.waves, self.points = list[Point](), list[Point]()
        self.ended = self.aborted = self.ties = 0

    def run(self, count: int, tell: Callable[[dict[str, Any]], None] = lambda found: None) -> dict[str, Any]:
        """Run the soak. `tell`: called with the figures after each wave."""
        free, started = self.free, time.perf_counter()
        for wave in range(10):
            concurrency = CONCURRENCY[wave % len(CONCURRENCY)]
            self._wave(count // 10, concurrency, seed=wave)
            while self.scheduler.has_requests():
                self.engine.step()
            self.waves.append(self._point(concurrency))
            assert self.free == free, f"blocks are lost in wave {wave}"
            runner = runner_of(self.llm)
            assert not runner.requests, "the runner keeps requests"
            assert not getattr(runner, "drafts", None), "the runner keeps trees"
            tell(self.found(time.perf_counter() - started))
        return self.found(time.perf_counter() - started)

    def found(self, seconds: float) -> dict[str, Any]:
        return {
            "requests": self.ended + self.aborted,
            "identical": self.ended - self.ties,
            "ties": self.ties,
            "aborted": self.aborted,
            "preempted": metric(self.llm, "num_preemptions"),
            "prefix hits": metric(self.llm, "prefix_cache_hits"),
            "accepted": metric(self.llm, "spec_decode_num_accepted_tokens"),
            "seconds": round(seconds, 1),
            "MB": [round(one.memory) for one in self.waves],
            "free": [one.free for one in self.waves],
            "points": [[one.ended, one.concurrency, round(one.memory, 1), one.free] for one in self.points],
        }

    @property
    def free(self) -> int:
        count: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return count

    def _point(self, concurrency: int) -> Point:
        return Point(self.ended + self.aborted, concurrency, resident(), self.free)

    def _wave(self, count: int, concurrency: int, seed: int) -> None:
        choose, running = random.Random(seed), dict[str, int]()
        names: Iterator[str] = (f"{seed}-{i}" for i in range(count))
        begun, due = self.ended + self.aborted, 1
        while True:
            while len(running) < concurrency and (name := next(names, None)) is not None:
                which = choose.randrange(len(self.requests))
                request = self.requests[which]
                self.engine.add_request(name, request.prompt, request.params.clone(), lora_request=request.lora)
                running[name] = which
            if not running:
                return
            for output in self.engine.step():
                known, found = self.references[running.pop(output.request_id)], output.outputs[0]
                assert_identical([known], [found])
                self.ties += list(known.token_ids) != list(found.token_ids)
                self.ended += 1
            if running and choose.random() < ABORTED / 4:
                name = choose.choice(list(running))
                self.engine.abort_request([name], internal=False)
                del running[name]
                self.aborted += 1
            if (self.ended + self.aborted - begun) * 10 >= count * due:
                self.points.append(self._point(concurrency))
                due += 1


ARGUMENTS: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}
CONFIG = tree(12, threshold=0.2, lookup="ngram")


def references(engines: Engines, requests: list[Request]) -> list[Any]:
    """vLLM's answers without speculation."""
    llm = engines.start(**ARGUMENTS)
    params = [one.params.clone() for one in requests]
    for one in params:
        one.logprobs = 2
    prompts, adapters = [one.prompt for one in requests], [one.lora for one in requests]
    return [found.outputs[0] for found in llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)]


def plot(found: dict[str, Any], file: Path) -> None:
    """Memory and free blocks over requests."""
    import matplotlib.pyplot as plt

    figure, (memory, blocks) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), layout="constrained")
    ended, concurrency, megabytes, free = zip(*found["points"], strict=True)
    ends = [count * found["requests"] / len(found["MB"]) for count in range(1, 1 + len(found["MB"]))]
    memory.plot(ended, megabytes)
    memory.set(ylabel="resident MB", ylim=(0, None))
    blocks.plot(ended, free, label="under load")
    blocks.plot(ends, found["free"], "o", label="without a request")
    blocks.set(ylabel="free blocks", xlabel="requests that have ended", ylim=(0, None))
    blocks.legend()
    for begin, end, number in zip([0, *ends], ends, concurrency[:: len(ended) // len(ends)], strict=False):
        memory.text((begin + end) / 2, 0, f"{number} at a time", ha="center", va="bottom", fontsize=7)
        memory.axvline(end, linewidth=0.3)
    figure.savefig(file, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--out", type=Path, help="a file, which is written after each tenth of the requests")
    parser.add_argument("--plot", type=Path, help="a PNG of memory and free blocks")
    given, engines = parser.parse_args(), Engines()

    def tell(found: dict[str, Any]) -> None:
        print(json.dumps(found), flush=True)
        if given.out is not None:
            save(given.out, found)

    with tempfile.TemporaryDirectory() as folder:
        requests = pool(Path(folder))
        expected = references(engines, requests)
        found = Soak(engines.start(CONFIG, **ARGUMENTS, **SMALL), requests, expected).run(given.count, tell)
    if given.plot is not None:
        plot(found, given.plot)


if __name__ == "__main__":
    import tests.engine.conftest  # noqa: F401  the environment of the tests

    main()
