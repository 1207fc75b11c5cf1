"""Microseconds of the host in a step of the budget, by part, on both model runners, without an engine.

    python -m benchmarks.planner.step_time [--out FILE]

Recorded trees of 24 nodes under costs at which drafting pays, and at which it does not. Counted is the processor time
of one thread, the mean over the steps of a round, the best of several. On Model Runner
V2 PyTorch's dispatch to a device is in it, the device's own time is not. `fit`: of the draft's temperature on V1.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def"

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed import parallel_state

from benchmarks.planner.recording import Recording, bundled
from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.bench.provenance import save
from vllm_adaptive_tree.budget import Costs, Curve, DraftTemperature, Planner
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.engine.v1.budget import HostBudget
from vllm_adaptive_tree.engine.v1.clock import PhaseClock
from vllm_adaptive_tree.engine.v1.drafts import Draft, to_drafts
from vllm_adaptive_tree.engine.v1.verification import Verification
from vllm_adaptive_tree.engine.v2.budget import DeviceBudget
from vllm_adaptive_tree.engine.v2.phase_times import PhaseTimes
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.trees import TreeBatch

NODES, LEVELS, CONTEXT, VOCABULARY = 24, 8, 600, 8192
REQUESTS = 1, 8, 64
STEPS, WARM, ROUNDS = 128, 64, 8
DRAFTS, RESTS = 0.0002, 0.5
"""Seconds of a draft level at which drafting pays, and at which it does not."""


class Trees:
    """Recorded trees, batch after batch, with the nodes that the target has accepted."""

    def __init__(self, requests: int):
        recording = Recording.load(next(file for file in bundled() if file.stem == "bundled-opt_tree"))
        self.recording, self.requests = recording, requests
        self.index = np.random.default_rng(0).permutation(len(recording.value))

    def batch(self, step: int) -> tuple[TreeBatch, torch.Tensor]:
        """Trees of a step [R, N], and the accepted nodes [R, L]."""
        first = step * self.requests
        rows = self.index[np.arange(first, first + self.requests) % len(self.index)]
        value, parent, depth, hit = (
            one[rows, :NODES]
            for one in (self.recording.value, self.recording.parent, self.recording.depth, self.recording.accepted)
        )
        token = np.where(depth > 0, np.arange(NODES), -1)
        with np.errstate(divide="ignore"):
            weight = torch.from_numpy(np.log(value).astype(np.float32))
        tree = TreeBatch(*(torch.from_numpy(one) for one in (token, parent, depth)), weight)
        order = np.argsort(~hit, axis=1, kind="stable")[:, :LEVELS]
        nodes = np.where(np.take_along_axis(hit, order, 1), order, -1)
        return tree, torch.from_numpy(np.pad(nodes, ((0, 0), (0, 1)), constant_values=-1))


class Parts:
    """Processor time by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self.seconds[name] += time.thread_time() - begin


def planner(level: float) -> tuple[Planner, ThresholdController]:
    options, _ = TreeOptions.parse({"method": "opt_tree", "model": "x", "num_speculative_tokens": NODES})
    verify = Curve([1, 2, 4, 8, 16, 32, 64, 128, 256, 2048], np.linspace(0.006, 0.008, 10))
    costs = Costs(verify, Curve([1, 2, 4, 64], [level] * 4))
    return Planner(costs, sampled=False), ThresholdController(resolve(options).proposer, options.tree.steered)


class HostSteps:
    """Steps on Model Runner V1."""

    def __init__(self, requests: int, level: float):
        self.trees, self.requests, self.clock = Trees(requests), requests, PhaseClock()
        self.level = level
        self.budget = HostBudget(*planner(level), self.clock)
        self.fit = DraftTemperature(0.6)
        self.greedy = torch.ones(requests, dtype=torch.bool)
        self.logits = torch.randn(requests, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.drafts, self.nodes = dict[int, Draft](), torch.full((requests, 1 + LEVELS), -1)

    def step(self, number: int, parts: Parts) -> None:
        budget, requests = self.budget, self.requests
        sizes = [len(self.drafts[row].tree) if row in self.drafts else 0 for row in range(requests)]
        starts = np.cumsum([0, *(1 + size for size in sizes)]).tolist()
        counts, computed = [1 + size for size in sizes], [CONTEXT] * requests
        verification = Verification(self.drafts, starts[:-1], counts, computed, VOCABULARY)
        _ = verification.row, verification.node, verification.sizes, verification.branches
        nodes = self.nodes.masked_fill(self.nodes >= torch.tensor(sizes)[:, None], -1)
        accepted = Accepted(nodes.clamp(min=0), nodes)
        with parts.timed("begin"):
            budget.begin_step()
        with parts.timed("verified"):
            budget.verified(verification, accepted)
        if self.drafts:
            with parts.timed("fit"):
                self.fit.observe(list(self.logits), accepted.tokens[:, 0].tolist())
        with parts.timed("begin"):
            levels = budget.begin_levels([True] * requests)
        drafting = LEVELS * self.level if levels else 0.0
        self.clock.seconds.update(verify=0.006, draft=drafting, tree=1e-5 if levels else 0.0)
        self.drafts = {}
        if levels:
            tree, self.nodes = self.trees.batch(number)
            proposal = Proposal(tree, tree.depth * 0, tree.depth * 0)
            drafts = to_drafts(proposal, [], torch.full((requests,), 0.6))
            growing = [(requests, self.level)] * (LEVELS - 1)
            with parts.timed("cut"):
                cut = budget.cut(
                    drafts,
                    proposal,
                    self.greedy,
                    [None] * requests,
                    growing,
                    level=None,
                    looking=0.0,
                    num_without_tree=0,
                    prompts=False,
                    gaps=False,
                )
            self.drafts = dict(enumerate(cut))
        budget.started = time.perf_counter() - 0.006 - drafting
        with parts.timed("end"):
            budget.end_step(verification)
        self.clock.take()


class DeviceSteps:
    """Steps on Model Runner V2."""

    def __init__(self, requests: int, level: float):
        self.trees, self.requests = Trees(requests), requests
        self.times, self.greedy = PhaseTimes(torch.device("cpu")), np.ones(requests, dtype=bool)
        self.times._mark = self.mark  # type: ignore[method-assign]
        self.now, self.level = 1.0, level
        self.budget = DeviceBudget(*planner(level), self.times, learns=True)
        self.tree: TreeBatch | None = None
        self.nodes = torch.full((requests, 1 + LEVELS), -1)

    def mark(self) -> float:
        return self.now

    def step(self, number: int, parts: Parts) -> None:
        budget, requests = self.budget, self.requests
        kept = (budget.nodes or 0) // requests if self.tree is not None else 0
        rows = requests * (1 + kept)
        with self.times.phase("verify"):
            self.now += 0.006
            if kept:
                tree = self.tree.cut(torch.full((requests,), kept))  # type: ignore[union-attr]
                nodes = self.nodes.masked_fill(self.nodes >= kept, -1)
                with parts.timed("verified"):
                    budget.verified(tree, Accepted(nodes, nodes), self.greedy, None)
        with self.times.phase("draft"):
            with parts.timed("begin"):
                levels = budget.begin_step(self.greedy)
            self.tree = None
            if levels:
                self.now += LEVELS * self.level
                self.tree, self.nodes = self.trees.batch(number)
                with parts.timed("drafted"):
                    budget.drafted(self.tree, self.greedy, None)
            with parts.timed("end"):
                flags = {"prefills": False, "missed": False, "trees": bool(levels)}
                budget.end_step(requests, rows, CONTEXT, LEVELS - 1 if levels else 0, **flags)
        self.times.take()


RUNNERS: dict[str, Any] = {"V1": HostSteps, "V2": DeviceSteps}


def measured(runner: str, requests: int, level: float) -> dict[str, float]:
    """Microseconds of a step by part, and their `sum` without the fit."""
    steps, best = RUNNERS[runner](requests, level), dict[str, float]()
    for number in range(WARM):
        steps.step(number, Parts())
    for turn in range(ROUNDS):
        parts = Parts()
        for number in range(STEPS):
            steps.step(WARM + turn * STEPS + number, parts)
        for name, seconds in parts.seconds.items():
            best[name] = min(best.get(name, seconds), seconds)
    found = {name: round(1e6 * seconds / STEPS, 1) for name, seconds in best.items()}
    return {**found, "sum": round(sum(us for name, us in found.items() if name != "fit"), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parallel_state._TP = SimpleNamespace(world_size=1)
    rows = [
        {"runner": runner, "step": step, "requests": requests, "microseconds": measured(runner, requests, level)}
        for runner in RUNNERS
        for step, level in (("drafting", DRAFTS), ("resting", RESTS))
        for requests in REQUESTS
    ]
    for row in rows:
        print(json.dumps(row), flush=True)
    if options.out is not None:
        save(options.out, rows)


if __name__ == "__main__":
    main()
