"""What forwards cost on Model Runner V2, measured when the engine starts."""

import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_adaptive_tree.budget import Costs, Curve
from vllm_adaptive_tree.budget.curve import profiled_rows
from vllm_adaptive_tree.engine.cost_profile import threshold
from vllm_adaptive_tree.engine.ranks import from_rank_0

ROUNDS = 5
MOST_ROWS = 256
SECONDS = 20.0
"""After these, a profile keeps the points that it has."""


def measured_costs(runner: Any, nodes: int) -> Costs:
    """Costs of a verification by rows, of one row a request where there are as many requests, and of a draft level of
    up to `nodes` rows. What contexts cost is in neither, and is learnt from live steps."""
    most = min(MOST_ROWS, runner.max_num_tokens - runner.max_num_reqs)
    started, points = time.perf_counter(), []
    for count in profiled_rows(most):
        points.append((count, _seconds(runner, lambda count=count: runner._dummy_run(count))))  # type: ignore[misc]
        late = len(points) > 2 and time.perf_counter() - started > SECONDS
        if bool(from_rank_0(torch.tensor(late, dtype=torch.int64, device=runner.device))):
            break
    levels = [(count, _seconds(runner, _level(runner.speculator, count))) for count in sorted({1, max(2, nodes)})]
    verify, draft = (
        Curve(*from_rank_0(torch.tensor(found, dtype=torch.float64, device=runner.device)).cpu().t())
        for found in (points, levels)
    )
    return Costs(verify, draft)


def measured_threshold(runner: Any, nodes: int) -> float:
    """As V1's: what a draft level of `nodes` rows costs in target forwards of `nodes` + 1 rows, on rank 0."""
    level = _seconds(runner, _level(runner.speculator, nodes))
    ratio = level / _seconds(runner, lambda: runner._dummy_run(nodes + 1))
    return threshold(float(from_rank_0(torch.tensor(ratio, dtype=torch.float64, device=runner.device))))


def _level(speculator: Any, rows: int) -> Callable[[], Any]:
    tokens = torch.zeros(rows, dtype=torch.int32, device=speculator.device)
    forward = speculator._run_model
    return lambda: speculator.compute_draft_logits(forward(tokens, tokens.long(), None, None, None), 0)


def _seconds(runner: Any, forward: Callable[[], Any]) -> float:
    """The fastest: other programs only add to it."""

    def wait() -> None:
        if runner.device.type != "cpu":
            torch.accelerator.synchronize()

    seconds = []
    for _ in range(ROUNDS + 1):
        wait()
        started = time.perf_counter()
        forward()
        wait()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
