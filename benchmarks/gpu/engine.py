"""The whole engine on a GPU: does it say what vLLM says, does a step wait for the device, what does a step launch?

    python -m benchmarks.gpu.engine --out benchmarks/results/gpu/engine.json

Greedy requests, each method against vLLM without speculation, in bfloat16, which FlashAttention takes. There vLLM's
own tokens depend on the batch: where two runs part, a margin is by how much the log-probability of the first one's
token exceeded that of the next best. The yardstick is vLLM against itself with smaller batches: a method may part
from it only at margins as small. `waits`: places of this package where a decoding step makes the host wait.
`host_ms`: what a step takes the host; `launches`: kernels and graphs that a step starts.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm_adaptive_tree.bench.environment import DRAFT, HEAD, LATTICE, TARGET
from vllm_adaptive_tree.bench.models import enlarge
from vllm_adaptive_tree.bench.prompts import PROMPTS
from vllm_adaptive_tree.bench.provenance import save

METHODS: dict[str, dict[str, Any]] = {
    "adaptive_tree": {"method": "adaptive_tree", "model": DRAFT, "num_speculative_tokens": 16},
    "opt_tree": {"method": "opt_tree", "model": DRAFT, "num_speculative_tokens": 16},
    "dyspec": {"method": "dyspec", "model": DRAFT, "num_speculative_tokens": 16},
    "eagle2, 63 nodes": {"method": "eagle2", "model": DRAFT, "num_speculative_tokens": 63},
    "opt_tree, head": {"method": "opt_tree", "model": HEAD, "num_speculative_tokens": 16},
    "opt_tree, head of one forward": {"method": "opt_tree", "model": LATTICE, "num_speculative_tokens": 16},
}
SHARE = 0.3  # of the memory, for each engine
TIMES, LEAST = 3.0, 0.25
"""A margin may be so many times the yardstick's, or two roundings of a logit of 16 in bfloat16."""
LAUNCHES = {"kernels": ("cudaLaunchKernel", "cuLaunchKernel"), "graphs": ("cudaGraphLaunch",)}


class Run:
    """One engine, and the tokens of its greedy requests with the margins of each."""

    def __init__(self, model: str, speculation: dict[str, Any] | None, options: argparse.Namespace, **arguments: Any):
        from vllm import LLM

        self.options = options
        if speculation is not None:
            speculation = {**speculation, "tree": {"budget": None}}  # whole trees, whatever they cost
        defaults = {"dtype": options.dtype, "max_model_len": 1024, "max_num_seqs": options.requests}
        defaults |= {"gpu_memory_utilization": SHARE, "enforce_eager": options.rehearse}
        self.llm: Any = LLM(model, speculative_config=speculation, **{**defaults, **arguments})

    def outputs(self) -> list[Any]:
        from vllm import SamplingParams

        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(self.options.requests)]
        params = SamplingParams(temperature=0.0, max_tokens=self.options.tokens, ignore_eos=True, logprobs=2)
        return [one.outputs[0] for one in self.llm.generate(prompts, params, use_tqdm=False)]

    def steps(self) -> dict[str, Any]:
        """Cost of a step on the host and its launches, steps of prompts included."""
        worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        seconds: list[float] = []
        with _timed(worker, seconds), torch.profiler.profile() as profile:
            self.outputs()
        counts = Counter(event.key for event in profile.key_averages() for _ in range(event.count))
        found = {
            name: round(sum(counts[key] for key in counts if key.startswith(keys)) / len(seconds), 1)
            for name, keys in LAUNCHES.items()
        }
        seconds.clear()
        with _timed(worker, seconds):
            self.outputs()
        return {"host_ms": round(1e3 * sum(seconds) / len(seconds), 3), "steps": len(seconds), "launches": found}

    def shutdown(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


@contextmanager
def _timed(worker: Any, seconds: list[float]) -> Iterator[None]:
    """The host's seconds in the two calls of each step of a `worker`."""
    execute, sample = worker.execute_model, worker.sample_tokens

    def timed_execute(step: Any, *rest: Any) -> Any:
        began = time.perf_counter()
        found = execute(step, *rest)
        if step.total_num_scheduled_tokens:
            seconds.append(time.perf_counter() - began)
        return found

    def timed_sample(*arguments: Any) -> Any:
        began = time.perf_counter()
        found = sample(*arguments)
        seconds[-1] += time.perf_counter() - began
        return found

    worker.execute_model, worker.sample_tokens = timed_execute, timed_sample
    try:
        yield
    finally:
        del worker.execute_model, worker.sample_tokens


def margins(expected: list[Any], found: list[Any]) -> list[float]:
    """Leads of the expected token over the next best where requests first differ; [] if none does."""
    apart = []
    for one, other in zip(expected, found, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        at = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        if at is not None:
            best, second = sorted((entry.logprob for entry in one.logprobs[at].values()), reverse=True)[:2]
            apart.append(round(best - second, 4))
    return apart


@contextmanager
def waiting() -> Iterator[list[str]]:
    """Places in this package at which the host waits for the device inside the block; none on a CPU."""
    if not torch.cuda.is_available():
        yield []
        return
    from vllm_adaptive_tree.engine.self_check.waits import watched

    with watched(torch.device("cuda")) as places:
        yield places


def measured(model: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Results after each method: a run that is ended leaves those before."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # PyTorch watches this process
    plain = Run(model, None, options)
    expected, steps = plain.outputs(), plain.steps()
    plain.shutdown()
    smaller = Run(model, None, options, max_num_seqs=max(options.requests // 4, 1))
    yardstick = margins(expected, smaller.outputs())
    smaller.shutdown()
    allowed = max(TIMES * max(yardstick, default=0.0), LEAST)
    rows = [{"method": "none", "margins": yardstick, **steps}]
    results = {"dtype": options.dtype, "requests": options.requests, "tokens": options.tokens, "rows": rows}
    yield results
    for name in options.methods or METHODS:
        run = Run(model, METHODS[name], options)
        apart = margins(expected, run.outputs())
        with waiting() as places:
            apart += margins(expected, run.outputs())
        waits = sorted(set(places))
        good = max(apart, default=0.0) <= allowed and not waits
        rows.append({"method": name, "margins": apart, "waits": waits, "good": good, **run.steps()})
        print(json.dumps(rows[-1]), flush=True)
        yield results
        run.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="a few tokens on a CPU")
    parser.add_argument("--methods", nargs="*", choices=METHODS)
    parser.add_argument("--enlarge-to", type=float, default=1e9, help="parameters of the target (default: 1e9)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu/engine.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.rehearse:
        print("benchmarks.gpu.engine needs a CUDA device, and PyTorch sees none here.", file=sys.stderr)
        return 2
    options.dtype, options.requests, options.tokens = "bfloat16", 16, 64
    if options.rehearse:
        options.dtype, options.requests, options.tokens = "float32", 4, 8
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, a rehearsal"
    with tempfile.TemporaryDirectory() as folder:
        model = TARGET
        if not options.rehearse:
            model = str(Path(folder) / "target")
            enlarge(Path(TARGET), Path(model), int(options.enlarge_to))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        for results in measured(model, options):
            save(options.out, {"device": device, "torch": torch.__version__, **results})
    return 0 if all(row.get("good", True) for row in results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
