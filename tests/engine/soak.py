"""Thousands of short requests at changing concurrency on one engine, and what must be true afterwards.

`python -m tests.engine.soak 10000 --out FILE` is the long form; test_soak.py runs a short one.
"""

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.engine.adapters import RANK, adapter
from tests.engine.engines import PROMPTS, TARGET, Engines, assert_identical, metric, tree

SMALL = {"num_gpu_blocks_override": 28, "max_model_len": 256, "max_num_batched_tokens": 1024, "max_num_seqs": 32}
"""Blocks for about 20 requests, so that more preempt each other."""
CONCURRENCY = 1, 4, 40, 12
"""In turn."""
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
    """Of every sort; each has one right answer."""
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


class Soak:
    """An engine under load; `peaks`: the process's largest memory in MB after each tenth of the requests."""

    def __init__(self, llm: Any, requests: list[Request], references: list[Any]):
        self.engine, self.requests, self.references = llm.llm_engine, requests, references
        self.llm = llm
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.peaks: list[float] = []
        self.ended = self.aborted = 0

    def run(self, count: int) -> dict[str, Any]:
        free, started = self.free, time.perf_counter()
        for wave in range(10):
            self._wave(count // 10, CONCURRENCY[wave % len(CONCURRENCY)], seed=wave)
            self.peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        while self.scheduler.has_requests():
            self.engine.step()
        assert self.free == free, "blocks are lost"
        return {
            "requests": self.ended + self.aborted,
            "identical": self.ended,
            "aborted": self.aborted,
            "preempted": metric(self.llm, "num_preemptions"),
            "prefix hits": metric(self.llm, "prefix_cache_hits"),
            "accepted": metric(self.llm, "spec_decode_num_accepted_tokens"),
            "seconds": round(time.perf_counter() - started, 1),
            "MB": [round(one) for one in self.peaks],
        }

    @property
    def free(self) -> int:
        count: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return count

    def _wave(self, count: int, concurrency: int, seed: int) -> None:
        choose, running = random.Random(seed), dict[str, int]()
        names: Iterator[str] = (f"{seed}-{i}" for i in range(count))
        while True:
            while len(running) < concurrency and (name := next(names, None)) is not None:
                which = choose.randrange(len(self.requests))
                request = self.requests[which]
                self.engine.add_request(name, request.prompt, request.params.clone(), lora_request=request.lora)
                running[name] = which
            if not running:
                return
            for output in self.engine.step():
                assert_identical([self.references[running.pop(output.request_id)]], [output.outputs[0]])
                self.ended += 1
            if running and choose.random() < ABORTED / 4:
                name = choose.choice(list(running))
                self.engine.abort_request([name], internal=False)
                del running[name]
                self.aborted += 1


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--out", type=Path)
    given, engines = parser.parse_args(), Engines()
    with tempfile.TemporaryDirectory() as folder:
        requests = pool(Path(folder))
        expected = references(engines, requests)
        found = Soak(engines.start(CONFIG, **ARGUMENTS, **SMALL), requests, expected).run(given.count)
    text = json.dumps(found)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    import tests.engine.conftest  # noqa: F401  the environment of the tests

    main()
