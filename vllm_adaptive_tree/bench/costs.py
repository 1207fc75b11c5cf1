"""Costs of forwards, measured here or estimated from a data sheet (roofline)."""

from functools import partial

from vllm_adaptive_tree.bench.offline import Offline, Setup
from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.projection import Hardware
from vllm_adaptive_tree.bench.results import FORWARDS
from vllm_adaptive_tree.bench.workloads import standard_library
from vllm_adaptive_tree.budget import Costs, Curve
from vllm_adaptive_tree.budget.cost import profiled_rows

NODES, TOKENS = 16, 32
ROUNDS, SECONDS = 5, 60.0  # of timing all sizes, at most


def roofline(weights: float, most: int, *, width: float, bandwidth: float, operations: float) -> Curve:
    """Seconds of a forward of up to `most` rows: the longer of the times to read the weights, and to do two operations
    per weight and row.

    `width`: bytes of a weight; `bandwidth`: bytes per second; `operations`: per second. Attention and launches are not
    counted.
    """
    rows, read = profiled_rows(most), weights * width / bandwidth
    return Curve(rows, [max(read, 2 * weights * row / operations) for row in rows])


def measured(name: str, model: str, draft: str, dtype: str, most: int) -> Hardware:
    """Costs of forwards of up to `most` rows on this machine, and seconds of a step outside the models."""
    from vllm_adaptive_tree.engine.startup.measuring import POINTS, fastest
    from vllm_adaptive_tree.engine.v1.startup_costs import draft_level, measured_costs, target_forward

    speculation = {"method": "opt_tree", "model": draft, "num_speculative_tokens": NODES, "tree": {"threshold": 0}}
    setup = Setup(model, dtype, False, 32, most, TOKENS, standard_library())
    offline = Offline(Config("opt_tree", "method", speculation), setup)
    cell = Cell("offline", 1)
    offline.measure(cell, 0)
    found = offline.measure(cell, 1)
    runner = offline.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    rows = profiled_rows(most)
    verify, levels = (
        fastest(forwards, rounds=ROUNDS, seconds=SECONDS, least=POINTS)
        for forwards in (
            [partial(target_forward, runner, count) for count in rows],
            [partial(draft_level, runner.drafter, count) for count in rows],
        )
    )
    context = measured_costs(runner, NODES).costs.context
    offline.engine.engine_core.shutdown()
    costs = Costs(Curve(rows[: len(verify)], verify), Curve(rows[: len(levels)], levels), context)
    return Hardware(name, costs, (found.seconds - sum(found.phases[name] for name in FORWARDS)) / found.steps)
