"""Microseconds of the host in a step of Model Runner V2, of this package's own Python, measured without a device.

    python -m benchmarks.gpu.host_time --out benchmarks/results/gpu/host_time.json

Kernels are compiled for sm_90 as on a GPU, and a fake driver of Triton launches nothing. PyTorch's operations run on
the CPU, on tensors of a few bytes. Counted is the processor time of the thread, the best of several rounds: vLLM's
part, the launch in C and PyTorch's dispatch to CUDA are not in it. Trees of 24 nodes, 36 layers, 32 query and 8 K/V
heads. Times of a busy machine are no test; the calls of functions in the same parts have no noise, and a test bounds
them by those of the last run in the file.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def"

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vllm_adaptive_tree.bench.provenance import save

NODES, LAYERS, HEADS, KV_HEADS, SIZE, BLOCK, CONTEXT, LEVELS = 24, 36, 32, 8, 128, 16, 600, 8
PROCESSORS = 132
REQUESTS = 1, 64
RUNS = 64
LAUNCHED: list[tuple[Any, ...]] = []
"""Arguments of the last launches."""


class Utilities:
    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 1, 2, 64, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": PROCESSORS, "max_num_regs": 65536, "warpSize": 32}

    def unload_module(self, *_: Any) -> None:
        """Do nothing."""


class Launcher:
    def __init__(self, source: Any, metadata: Any):
        """Of one compiled kernel."""

    def __call__(self, *arguments: Any) -> None:
        if len(LAUNCHED) < 64:
            LAUNCHED.append((*arguments[:3], *arguments[9:]))  # grid and arguments, without stream and hooks


class Driver:
    """Triton's driver of an H100 that is not there."""

    utils, launcher_cls = Utilities(), Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_interface(self) -> None:
        return None

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    @staticmethod
    def is_active() -> bool:
        return True


class Attention:
    """Attention of a layer in a verification of so many requests."""

    def __init__(self, requests: int):
        from vllm_adaptive_tree.attention.plan import AttentionPlan
        from vllm_adaptive_tree.engine.v2.attention import KernelTrees, PagedTreeAttention

        rows, half, device = requests * (1 + NODES), torch.bfloat16, torch.device("cpu")
        self.start = torch.arange(0, rows + 1, 1 + NODES, dtype=torch.int32)
        self.context = torch.full((requests,), CONTEXT, dtype=torch.int32)
        self.plan = AttentionPlan(
            2048, 256, HEADS, KV_HEADS, SIZE, half, device, rows_per_request=1 + NODES, processors=PROCESSORS
        )
        table, bits = torch.zeros(256, 64, dtype=torch.int32)[:requests], torch.ones(2048, 1, dtype=torch.int64)
        self.metadata = KernelTrees(None, table, self.start, self.context, bits, rows, self.plan)
        self.impl: Any = object.__new__(PagedTreeAttention)
        self.impl.__dict__.update(head_size=SIZE, scale=SIZE**-0.5)
        self.cache = torch.zeros(64, KV_HEADS, BLOCK, 2 * SIZE, dtype=half)
        self.query = torch.zeros(rows, HEADS, SIZE, dtype=half)
        self.out = torch.zeros_like(self.query)

    def update(self) -> None:
        self.plan.update(self.start, self.context)

    def attend(self) -> None:
        self.metadata.attend(self.impl, None, self.query, self.query, self.query, self.cache, self.out)

    def attend_by_triton(self) -> None:
        """As a first launch."""
        self.plan.launches.variants.clear()
        self.attend()


def parts(requests: int) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Part of a step -> how often it runs, and what runs."""
    from tests.config.test_device_budget import TREES, batch_of
    from vllm_adaptive_tree.acceptance import Accepted
    from vllm_adaptive_tree.budget import Costs, Curve, Planner
    from vllm_adaptive_tree.config import TreeOptions
    from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
    from vllm_adaptive_tree.engine.v2.budget import DeviceBudget
    from vllm_adaptive_tree.engine.v2.drafts import Drafts
    from vllm_adaptive_tree.engine.v2.phase_times import PhaseTimes
    from vllm_adaptive_tree.kernels import commit, walk
    from vllm_adaptive_tree.kernels.layout import Layout
    from vllm_adaptive_tree.kernels.reading import Cache, DraftInputs, Shaping, StepTensors
    from vllm_adaptive_tree.methods import resolve

    device, attention = torch.device("cpu"), Attention(requests)
    drafts, layout = Drafts(256, 256, NODES, 8, device), Layout.empty(256, 2048, NODES, device)
    index, number, start = torch.arange(requests), torch.zeros(256), attention.start
    positions, ids = torch.zeros(2048, dtype=torch.int64), torch.zeros(2048, dtype=torch.int32)
    nodes, table = torch.full((requests, 1 + LEVELS), -1), torch.zeros(requests, 64, dtype=torch.int32)
    inputs = DraftInputs.empty(256, 2 + LEVELS, device)
    step = StepTensors(index, index, start, nodes, number.int(), number, number.long(), torch.zeros(256, 64).int())
    shaping, ready = Shaping(0.6, 1.0, follows=True, threshold=0.1, floor=-3.0), torch.ones(256, dtype=torch.int8)
    addresses = commit.layer_addresses([attention.cache] * LAYERS)
    tree, sampled = batch_of(TREES[LEVELS], requests), torch.zeros(2048, dtype=torch.int64)
    root = torch.zeros(requests, dtype=torch.int64)

    options, _ = TreeOptions.parse({"method": "opt_tree", "model": "x", "num_speculative_tokens": NODES})
    curve = Curve([1, 256], [0.006, 0.008])
    planner, times = Planner(Costs(curve, Curve([1, 64], [0.001, 0.001])), sampled=False), PhaseTimes(device)
    steering = ThresholdController(resolve(options).proposer, options.tree.steered)
    budget, greedy = DeviceBudget(planner, steering, times, learns=True), np.ones(requests, dtype=bool)

    def plan_step() -> None:
        with times.phase("verify"):
            budget.verified(tree, Accepted(nodes, nodes), greedy, None)
        with times.phase("draft"):
            budget.begin_step(greedy)
            budget.drafted(tree, greedy, None)
            kept = {"prefills": False, "missed": False, "trees": True}
            budget.end_step(requests, requests * (1 + NODES), CONTEXT, LEVELS, **kept)
        times.take()

    placed = {"padded": requests, "padding": 256, "limit": 4096, "shift": 0}
    return {
        "rows of the trees": (1, lambda: layout.update(drafts.drafted, index, start, start, positions, ids)),
        "work list of the attention": (1, attention.update),
        "attention of a layer": (LAYERS, attention.attend),
        "walk": (1, lambda: walk(tree, sampled, root, levels=LEVELS)),
        "commit": (1, lambda: commit.move_accepted(addresses, attention.cache, table, root, nodes)),
        "what the draft starts from": (
            1,
            lambda: inputs.update(step, shaping, ready, Cache(table, BLOCK), **placed),
        ),
        "budget": (1, plan_step),
    }


def microseconds(function: Callable[[], Any], calls: int) -> float:
    for _ in range(calls):  # what is learnt and compiled first
        function()
    best = float("inf")
    for _ in range(5):
        begin = time.thread_time()
        for _ in range(calls):
            function()
        best = min(best, (time.thread_time() - begin) / calls)
    return round(1e6 * best, 1)


def function_calls(function: Callable[[], Any]) -> float:
    """Calls of functions in a run, those in C too: the mean of `RUNS` after as many others."""
    count = 0

    def watch(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(RUNS):
        function()
    sys.setprofile(watch)
    for _ in range(RUNS):
        function()
    sys.setprofile(None)
    return round(count / RUNS, 1)


def counted() -> dict[str, Any]:
    """Calls in each part and in a step, by number of requests. A clock that ticks when it is read: what the budget does
    depends on times."""
    from vllm_adaptive_tree.engine.v2 import phase_times

    found, ticks = dict[str, Any](), itertools.count()
    for requests in REQUESTS:
        with patch.object(phase_times.time, "perf_counter", lambda: 0.001 * next(ticks)):
            figures = {name: (times, function_calls(function)) for name, (times, function) in parts(requests).items()}
        step = round(sum(times * figure for times, figure in figures.values()), 1)
        found[str(requests)] = {**{name: figure for name, (_, figure) in figures.items()}, "step": step}
    return found


def measured(calls: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for requests in REQUESTS:
        figures = {name: (times, microseconds(function, calls)) for name, (times, function) in parts(requests).items()}
        by_part = {name: figure for name, (_, figure) in figures.items()}
        step = round(sum(times * figure for times, figure in figures.values()), 1)
        by_triton = microseconds(Attention(requests).attend_by_triton, max(calls // 10, 1))
        found[str(requests)] = {**by_part, "step": step, "attention of a layer, launched by Triton": by_triton}
    return found


def same_arguments() -> bool:
    """Return whether a launch has the arguments that Triton's own had."""
    attention = Attention(1)
    for run in (attention.update, attention.attend):
        run()
    first = list(LAUNCHED)
    LAUNCHED.clear()
    for run in (attention.update, attention.attend):
        run()
    pairs = zip(first, LAUNCHED, strict=True)
    return len(first) == 3 and all(len(one) == len(other) and all(map(_same, one, other)) for one, other in pairs)


def _same(one: Any, other: Any) -> bool:
    return one.data_ptr() == other.data_ptr() if isinstance(one, torch.Tensor) else bool(one == other)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of all runs, to which this one is added")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--label", default="", help="what was measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    driver.set_active(Driver())
    if not same_arguments():
        print("a prepared launch has other arguments than Triton's")
        return 1
    run = {"label": options.label, "requests": measured(options.calls), "function calls": counted()}
    if options.out is not None:
        before = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
        save(options.out, [*before, run])
    print(json.dumps(run, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
