"""Costs of forwards on Model Runner V2, measured when the engine starts."""

import time
from bisect import bisect_left
from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_adaptive_tree.budget import Costs, Curve
from vllm_adaptive_tree.budget.cost import profiled_rows
from vllm_adaptive_tree.engine.common.ranks import object_from_rank_0
from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.startup.measuring import (
    MAX_ROWS,
    POINTS,
    MeasuredCosts,
    Prepare,
    Times,
    fastest_on_rank_0,
    threshold,
)
from vllm_adaptive_tree.engine.v2.budget import level_seconds
from vllm_adaptive_tree.engine.v2.phase_times import reached
from vllm_adaptive_tree.engine.v2.trial import Trial

ROUNDS = 5
SECONDS = 20.0
"""Seconds after which a profile keeps the points that it has."""
REQUESTS = 1, 8, 64
"""Numbers of requests whose drafting is timed, besides the largest number that has trees."""


def measured_costs(runner: Any, nodes: int) -> MeasuredCosts:
    """Costs of a verification by rows, of one row a request if there are as many requests, and of a draft level by
    requests. The cost of contexts is in neither, and is learnt from live steps."""
    # vLLM's dummy run takes no more: it keeps a token free for each of its requests.
    most = max(POINTS, runner.max_num_tokens - runner.max_num_reqs, runner.max_num_tokens // 2)
    rows = _rows(most, runner.compilation_config.cudagraph_capture_sizes)
    verify, disturbance = _fastest(runner, [_target(runner, count) for count in rows], least=POINTS)
    draft, besides = _drafts(runner)
    return MeasuredCosts(Costs(Curve(rows[: len(verify)], verify), draft), disturbance, besides)


def _rows(most: int, sizes: list[int]) -> list[int]:
    """Rows of the verifications that are measured, at most so many. Those in CUDA graphs of these `sizes` run as many
    as the next size has; one more than the last has no graph."""
    if not sizes:
        return profiled_rows(min(MAX_ROWS, most))
    last = sizes[-1]
    rows = [*profiled_rows(min(max(MAX_ROWS, last), most)), last, 1 + last]
    return sorted({min(sizes[bisect_left(sizes, count)] if count <= last else count, most) for count in rows})


def measured_threshold(runner: Any, nodes: int) -> float:
    """Threshold as V1's: the cost of a draft level in target forwards of `nodes` + 1 rows, for one request."""
    (target,) = _fastest(runner, [_target(runner, nodes + 1)], least=1).seconds
    return threshold(_drafting(runner, 1)[0] / target)


def _fastest(runner: Any, forwards: list[Prepare], *, least: int) -> Times:
    return fastest_on_rank_0(forwards, rounds=ROUNDS, seconds=SECONDS, least=least, device=runner.device)


def _target(runner: Any, rows: int) -> Prepare:
    """A verification without the draft that vLLM's dummy run includes, and with the logits of all rows that it does
    not. Its rows have random tokens and count as no padding, or experts would be few, or none."""

    def run() -> None:
        dummy, speculator = InputBatch.make_dummy, runner.speculator
        off, speculator.off = speculator.off, True
        try:
            with swapped(InputBatch, "make_dummy", lambda *args, **kw: dummy(*args, **{**kw, "is_padding": False})):
                hidden_states, _ = runner._dummy_run(rows, randomize_inputs=True)
            if hidden_states is not None:
                runner.model.compute_logits(hidden_states[:rows])
        finally:
            speculator.off = off

    return lambda: run


def _drafts(runner: Any) -> tuple[Curve, float]:
    """Seconds of a draft level by requests, and of what drafting takes besides for one."""
    trees, started = runner.speculator.most_trees, time.perf_counter()
    counts, found = list[int](), list[tuple[float, float]]()
    for count in sorted({count for count in REQUESTS if count < trees} | {trees}):
        counts.append(count)
        found.append(_drafting(runner, count))
        if object_from_rank_0(time.perf_counter() - started > SECONDS):
            break
    if len(counts) < POINTS:
        counts, found = [*counts, 1 + counts[0]], 2 * found
    return Curve(counts, [level for level, _ in found]), found[0][1]


@torch.inference_mode()
def _drafting(runner: Any, requests: int) -> tuple[float, float]:
    """Seconds of a draft level of so many requests, and of what drafting takes besides its levels, in steps of the
    engine, with its graphs. Of as many requests as the cache holds."""
    speculator, found = runner.speculator, list[tuple[float, float]]()
    with Trial(runner) as trial:
        names = [f"costs {number}" for number in range(max(1, min(requests, trial.room(1, more=ROUNDS))))]
        trial.begin({name: [0] for name in names}, more=ROUNDS)
        for _ in range(ROUNDS):
            trial.decode(names, logits=False)
            reached(runner.stats.times.draft.end)
            whole, growth = runner.stats.times.draft.seconds()
            levels = 1 + speculator.forwards
            level = level_seconds(growth, levels) or whole
            found.append((level, whole - levels * level))
        trial.finish(names)
    return object_from_rank_0(min(found))
