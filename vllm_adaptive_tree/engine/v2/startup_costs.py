"""Costs of forwards on Model Runner V2, measured when the engine starts."""

from functools import partial
from typing import Any

from vllm_adaptive_tree.budget import Costs, Curve
from vllm_adaptive_tree.budget.cost import profiled_rows
from vllm_adaptive_tree.engine.startup.measuring import MAX_ROWS, POINTS, Prepare, fastest_on_rank_0, threshold

ROUNDS = 5
SECONDS = 20.0
"""Seconds after which a profile keeps the points that it has."""


def measured_costs(runner: Any, nodes: int) -> Costs:
    """Costs of a verification by rows, of one row a request if there are as many requests, and of a draft level of up
    to `nodes` rows. The cost of contexts is in neither, and is learnt from live steps."""
    # vLLM's dummy run takes no more: it keeps a token free for each of its requests.
    most = max(POINTS, runner.max_num_tokens - runner.max_num_reqs, runner.max_num_tokens // 2)
    rows, levels = profiled_rows(min(MAX_ROWS, most)), sorted({1, max(2, nodes)})
    forwards = [*(_level(runner, count) for count in levels), *(_target(runner, count) for count in rows)]
    seconds = _fastest(runner, forwards, least=len(levels) + POINTS)
    draft, verify = seconds[: len(levels)], seconds[len(levels) :]
    return Costs(Curve(rows[: len(verify)], verify), Curve(levels, draft))


def measured_threshold(runner: Any, nodes: int) -> float:
    """Threshold as V1's: the cost of a draft level of `nodes` rows in target forwards of `nodes` + 1 rows."""
    level, target = _fastest(runner, [_level(runner, nodes), _target(runner, nodes + 1)], least=2)
    return threshold(level / target)


def _fastest(runner: Any, forwards: list[Prepare], *, least: int) -> list[float]:
    return fastest_on_rank_0(forwards, rounds=ROUNDS, seconds=SECONDS, least=least, device=runner.device)


def _target(runner: Any, rows: int) -> Prepare:
    return lambda: partial(runner._dummy_run, rows, randomize_inputs=True)  # else all rows have the same experts


def _level(runner: Any, rows: int) -> Prepare:
    return partial(runner.speculator.measure, rows)
