"""What forwards cost on Model Runner V2, measured when the engine starts."""

import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_adaptive_tree.budget import Costs, Curve
from vllm_adaptive_tree.budget.cost import profiled_rows
from vllm_adaptive_tree.engine.common.measuring import POINTS, Prepare, fastest, threshold
from vllm_adaptive_tree.engine.common.ranks import from_rank_0

ROUNDS = 5
MOST_ROWS = 256
SECONDS = 20.0
"""After these, a profile keeps the points that it has."""


def measured_costs(runner: Any, nodes: int) -> Costs:
    """Costs of a verification by rows, of one row a request where there are as many requests, and of a draft level of
    up to `nodes` rows. What contexts cost is in neither, and is learnt from live steps."""
    # vLLM's dummy run takes no more: it keeps a token free for each of its requests.
    most = max(POINTS, runner.max_num_tokens - runner.max_num_reqs, runner.max_num_tokens // 2)
    rows, levels = profiled_rows(min(MOST_ROWS, most)), sorted({1, max(2, nodes)})
    forwards = [_level(runner.speculator, count) for count in levels] + [_target(runner, count) for count in rows]
    found = _fastest(runner, forwards, least=len(levels) + POINTS)
    draft, verify = found[: len(levels)], found[len(levels) :]
    return Costs(Curve(rows[: len(verify)], verify), Curve(levels, draft))


def measured_threshold(runner: Any, nodes: int) -> float:
    """As V1's: what a draft level of `nodes` rows costs in target forwards of `nodes` + 1 rows, on rank 0."""
    level, target = _fastest(runner, [_level(runner.speculator, nodes), _target(runner, nodes + 1)], least=2)
    return threshold(level / target)


def _target(runner: Any, rows: int) -> Prepare:
    return lambda: lambda: runner._dummy_run(rows)


def _level(speculator: Any, rows: int) -> Prepare:
    tokens = torch.zeros(rows, dtype=torch.int32, device=speculator.device)
    forward = speculator._run_model
    return lambda: lambda: speculator.compute_draft_logits(forward(tokens, tokens.long(), None, None, None), 0)


def _fastest(runner: Any, forwards: list[Prepare], *, least: int) -> list[float]:
    """Rank 0's."""

    def wait() -> None:
        if runner.device.type != "cpu":
            torch.accelerator.synchronize()

    def timed(forward: Callable[[], Any]) -> float:
        wait()
        started = time.perf_counter()
        forward()
        wait()
        return time.perf_counter() - started

    def late(late: bool) -> bool:
        return bool(from_rank_0(torch.tensor(late, dtype=torch.int64, device=runner.device)))

    found = fastest(forwards, rounds=ROUNDS, seconds=SECONDS, least=least, late=late, timed=timed)
    agreed: list[float] = from_rank_0(torch.tensor(found, dtype=torch.float64, device=runner.device)).tolist()
    return agreed
