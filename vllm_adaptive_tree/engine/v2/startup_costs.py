"""Costs of forwards on Model Runner V2, measured when the engine starts."""

from bisect import bisect_left
from functools import partial
from typing import Any

from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_adaptive_tree.budget import Costs, Curve
from vllm_adaptive_tree.budget.cost import profiled_rows
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

ROUNDS = 5
SECONDS = 20.0
"""Seconds after which a profile keeps the points that it has."""


def measured_costs(runner: Any, nodes: int) -> MeasuredCosts:
    """Costs of a verification by rows, of one row a request if there are as many requests, and of a draft level of up
    to `nodes` rows. The cost of contexts is in neither, and is learnt from live steps."""
    # vLLM's dummy run takes no more: it keeps a token free for each of its requests.
    most = max(POINTS, runner.max_num_tokens - runner.max_num_reqs, runner.max_num_tokens // 2)
    rows, levels = _rows(most, runner.compilation_config.cudagraph_capture_sizes), sorted({1, max(2, nodes)})
    forwards = [*(_level(runner, count) for count in levels), *(_target(runner, count) for count in rows)]
    seconds, disturbance = _fastest(runner, forwards, least=len(levels) + POINTS)
    draft, verify = seconds[: len(levels)], seconds[len(levels) :]
    return MeasuredCosts(Costs(Curve(rows[: len(verify)], verify), Curve(levels, draft)), disturbance)


def _rows(most: int, sizes: list[int]) -> list[int]:
    """Rows of the verifications that are measured, at most so many. Those in CUDA graphs of these `sizes` run as many
    as the next size has; one more than the last has no graph."""
    if not sizes:
        return profiled_rows(min(MAX_ROWS, most))
    last = sizes[-1]
    rows = [*profiled_rows(min(max(MAX_ROWS, last), most)), last, 1 + last]
    return sorted({min(sizes[bisect_left(sizes, count)] if count <= last else count, most) for count in rows})


def measured_threshold(runner: Any, nodes: int) -> float:
    """Threshold as V1's: the cost of a draft level of `nodes` rows in target forwards of `nodes` + 1 rows."""
    level, target = _fastest(runner, [_level(runner, nodes), _target(runner, nodes + 1)], least=2).seconds
    return threshold(level / target)


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


def _level(runner: Any, rows: int) -> Prepare:
    return partial(runner.speculator.measure, rows)
