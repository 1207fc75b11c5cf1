"""Costs for `bench --project`: measured here, or the roofline of a data sheet."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm_adaptive_tree.bench.loads import standard
from vllm_adaptive_tree.bench.offline import Offline, Setup
from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.results import FORWARDS
from vllm_adaptive_tree.budget import Curve
from vllm_adaptive_tree.budget.curve import profiled_rows

TOKENS = 32
ROUNDS, SECONDS = 5, 60.0  # of timing all sizes, at most


def rows_up_to(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, .. and `most`."""
    steps = {step for power in range(20) for step in (2**power, 3 * 2**power)}
    return sorted({step for step in steps if step < most} | {most})


def roofline(
    weights: float, rows: Sequence[int], *, width: float, bandwidth: float, operations: float
) -> dict[str, list[float]]:
    """Seconds of a forward: reading all weights once, or two operations per weight and row, whichever takes longer.

    `width`: bytes of a weight; `bandwidth`: bytes per second; `operations`: per second. No attention, no launch.
    """
    read = weights * width / bandwidth
    return {"rows": list(rows), "seconds": [max(read, 2 * weights * row / operations) for row in rows]}


def measured(model: str, draft: str, dtype: str, most: int) -> dict[str, Any]:
    """Seconds of a target forward and of a draft level by rows, behind an empty context; and the rest of a step."""
    from vllm_adaptive_tree.engine.common.measuring import POINTS, fastest
    from vllm_adaptive_tree.engine.v1.startup_costs import draft_level, target_forward

    speculation = {"method": "opt_tree", "model": draft, "num_speculative_tokens": 16, "tree": {"threshold": 0}}
    setup = Setup(model, dtype, False, 1024, 32, most, TOKENS, 1.0, standard())
    offline = Offline(Config("opt_tree", "method", speculation), setup)
    cell = Cell("offline", 1)
    offline.measure(cell, 0)
    found = offline.measure(cell, 1)
    runner = offline.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    rows, counts = rows_up_to(most), profiled_rows(most)
    verify, levels = (
        fastest(forwards, rounds=ROUNDS, seconds=SECONDS, least=POINTS)
        for forwards in (
            [partial(target_forward, runner, count) for count in counts],
            [partial(draft_level, runner.drafter, count) for count in rows],
        )
    )
    offline.engine.engine_core.shutdown()
    rest = found.seconds - sum(found.phases[name] for name in FORWARDS)
    curves = {"verify": Curve(counts[: len(verify)], verify), "draft": Curve(rows[: len(levels)], levels)}
    return {**{name: one.to_json() for name, one in curves.items()}, "step": rest / found.steps}
