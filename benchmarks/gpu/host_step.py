"""Microseconds of the host in a whole step of Model Runner V2, with vLLM's part, measured without a device.

    python -m benchmarks.gpu.host_step --out benchmarks/results/gpu/host_step.json

vLLM's Python for CUDA with FULL graphs, on the faked platform of `tests/cuda`. Once the requests decode, a replay of a
graph, a kernel and the LM head do nothing: what is left is the Python of the scheduler, the worker and this package,
and PyTorch's dispatch, from a step's schedule to its output. A launch is one call (`host_time.py`; how many there are
is in `launches.json`), and what a budget plans is not in it, as its times are not a device's. Of every tree the deepest
path is accepted: nine tokens a step, 17 where look-ups are merged. Counted is the processor time of the thread, the
best of several rounds, and the calls of functions, those in C too, which have no noise. Every case runs in a process of
its own.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.bench.provenance import save

NODES, DEPTH = 24, 8
REQUESTS = 1, 64
ROUNDS, STEPS, WARM = 8, 25, 20
MOST_TOKENS, LONGEST, PROMPT = 2048, 8192, [7, 9, 11]
NONE, RESTING = "no speculation", "adaptive_tree at rest"
CASES: dict[str, dict[str, Any] | None] = {
    NONE: None,
    RESTING: {"method": "adaptive_tree", "tree": {"budget": "auto"}},
    "adaptive_tree": {"method": "adaptive_tree", "tree": {"budget": None, "max_depth": DEPTH}},
    "opt_tree": {"method": "opt_tree", "tree": {"budget": None, "max_depth": DEPTH}},
}


class Device:
    """Runs kernels in the interpreter, or nothing."""

    def __init__(self) -> None:
        self.off = True

    def install(self) -> None:
        """Before vLLM is imported."""
        from tests.cuda import tape

        os.environ.update(ADAPTIVE_TREE_GPU_CHECK="off", VLLM_LOGGING_LEVEL="ERROR", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
        tape.install((9, 0))
        import torch
        from triton.runtime.interpreter import InterpretedFunction

        torch.set_num_threads(1)
        library: Any = torch
        # A kernel that does not run leaves indices there.
        library.empty, library.empty_like = torch.zeros, torch.zeros_like
        library.Tensor.new_empty = torch.Tensor.new_zeros
        function: Any = InterpretedFunction
        run = function.run

        def launch(kernel: Any, *args: Any, **given: Any) -> Any:
            return None if self.off else run(kernel, *args, **given)

        function.run = launch
        tape.CUDAGraph.replay = lambda _: None  # type: ignore[method-assign]


def started(case: str, requests: int) -> Any:
    """An engine of so many requests, that has recorded its graphs."""
    from vllm import LLM
    from vllm.v1.worker import gpu_worker as worker

    from tests.engine.engines import DRAFT, TARGET
    from vllm_adaptive_tree.budget import Costs, Curve
    from vllm_adaptive_tree.engine import gpu_worker
    from vllm_adaptive_tree.engine.v2 import drafting, paged_draft, startup_costs

    costs = Costs(Curve([1, 256], [0.006, 0.008]), Curve([1, 64], [0.001, 0.001]))
    startup_costs.measured_costs = lambda *_: startup_costs.MeasuredCosts(costs, 0.001, 0.0)
    for module, name in ((gpu_worker, "warm_up"), (worker, "warmup_kernels")):
        setattr(module, name, lambda *_: None)  # steps of requests, whose rows a kernel would find
    for speculator in (drafting.TreeDrafting, paged_draft.PagedDraft):
        speculator.dummy_run = lambda *_, **__: None  # type: ignore[method-assign]
    given = CASES[case]
    speculation = given and {**given, "model": DRAFT, "num_speculative_tokens": NODES}
    rows = requests * (1 + (NODES if speculation else 0))
    return LLM(
        TARGET,
        dtype="bfloat16",
        max_model_len=LONGEST,
        max_num_seqs=requests,
        max_num_batched_tokens=max(MOST_TOKENS, rows),
        enable_prefix_caching=False,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": sorted({requests, rows}),
        },
        gpu_memory_utilization=0.01,
        num_gpu_blocks_override=1 + requests * LONGEST // 16,
        speculative_config=speculation,
    )


class Steps:
    """Steps of one engine whose requests decode."""

    def __init__(self, device: Device, llm: Any, requests: int, *, rests: bool):
        from vllm import SamplingParams

        from tests.engine.engines import runner_of
        from vllm_adaptive_tree.budget.fixed import Budget, Plan

        self.llm = llm  # an engine without an owner shuts down
        self.core, self.runner = llm.llm_engine.engine_core.engine_core, runner_of(llm)
        params = SamplingParams(temperature=0, max_tokens=LONGEST - 64, ignore_eos=True, detokenize=False)
        for number in range(requests):
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": [number, *PROMPT]}, params)
        if rests:
            self.runner.budget.budget = Budget(sampled=True)
            self.runner.budget.budget.plan = Plan(0, 0.0, most=0)
        device.off = False
        self.core.step_fn()  # reads the prompts
        device.off = True
        self._without_fake(requests)

    def _without_fake(self, requests: int) -> None:
        """Take from the steps what only a faked device costs, and the LM head."""
        import gc

        import torch
        from torch.overrides import _pop_mode

        _pop_mode()  # that of `tests.cuda.faked.OnCPU`
        gc.unfreeze()
        for one in gc.get_objects():
            own = getattr(one, "__dict__", None) if str(type(one).__module__).startswith("vllm") else None
            if isinstance(own, dict) and getattr(own.get("device"), "type", "") == "cuda":
                own["device"] = torch.device("cpu")
        vocabulary = self.runner.model_config.get_vocab_size()
        logits = torch.zeros(requests * (1 + NODES), vocabulary, dtype=torch.bfloat16)
        self.runner.model.compute_logits = lambda hidden, *_: logits[: len(hidden)]

    def run(self, count: int) -> None:
        """So many steps; each answers the tokens of the last one that was computed."""
        for _ in range(count):
            self.core.step_fn()


def measured(case: str, requests: int) -> dict[str, float]:
    device = Device()
    device.install()
    steps = Steps(device, started(case, requests), requests, rests=case == RESTING)
    steps.run(WARM)
    seconds = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        steps.run(STEPS)
        seconds.append((time.thread_time() - begin) / STEPS)
    calls = 0

    def watch(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(watch)
    steps.run(STEPS)
    sys.setprofile(None)
    assert steps.core.scheduler.get_num_unfinished_requests() == requests, "a request has ended"
    return {"microseconds": round(1e6 * min(seconds), 1), "function calls": round(calls / STEPS, 1)}


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = ["| | " + " | ".join(f"{requests} requests" for requests in results) + " |"]
    lines.append("| --- |" + " --- |" * len(results))
    for case in next(iter(results.values())):
        figures = [of[case] for of in results.values()]
        cells = [f"{one['microseconds']:,.0f} us, {one['function calls']:,.0f} calls" for one in figures]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of all runs, to which this one is added")
    parser.add_argument("--label", default="", help="what was measured")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "REQUESTS"), help="print the figures of one case as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one[0], int(options.one[1]))))
        return 0
    results: dict[str, dict[str, dict[str, float]]] = {}
    for requests in REQUESTS:
        for case in CASES:
            command = [sys.executable, "-m", "benchmarks.gpu.host_step", "--one", case, str(requests)]
            found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results.setdefault(str(requests), {})[case] = json.loads(found.stdout.splitlines()[-1])
    print(table(results))
    if options.out is not None:
        before = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
        save(options.out, [*before, {"label": options.label, "requests": results}])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
