"""Costs for `bench --project`: measured here, or the roofline of a data sheet."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm_adaptive_tree.bench.loads import standard
from vllm_adaptive_tree.bench.offline import Offline, Setup
from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.results import FORWARDS
from vllm_adaptive_tree.budget import Curve
from vllm_adaptive_tree.budget.curve import profiled_rows
from vllm_adaptive_tree.cli.arguments import new_file, positive
from vllm_adaptive_tree.cli.enlarge import parameters
from vllm_adaptive_tree.files import write_whole

MOST = 576
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
    from vllm_adaptive_tree.engine.measuring import POINTS, fastest
    from vllm_adaptive_tree.engine.profile import draft_level, target_forward

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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_adaptive_tree.bench.curve", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    here = kinds.add_parser("measure", help="on this machine")
    here.add_argument("--model", required=True)
    here.add_argument("--draft", required=True)
    here.add_argument("--dtype", default="auto")
    sheet = kinds.add_parser("roofline", help="from a data sheet")
    sheet.add_argument("--target", type=parameters, required=True, help="parameters")
    sheet.add_argument("--draft", type=parameters, required=True, help="parameters")
    sheet.add_argument("--width", type=float, default=2.0, help="bytes of a parameter (default: 2)")
    sheet.add_argument("--bandwidth", type=float, required=True, help="bytes per second")
    sheet.add_argument("--operations", type=float, required=True, help="per second")
    sheet.add_argument("--step", type=float, default=0.0, help="seconds of a step outside the models (default: 0)")
    for one in (here, sheet):
        one.add_argument("--name", required=True, help="machine and models, and whether measured")
        one.add_argument("--rows", type=positive, default=MOST, help="highest (default: %(default)s)")
        one.add_argument("--out", type=new_file, required=True)
    options = parser.parse_args(arguments)
    if options.kind == "measure":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model is reached into
        costs = measured(options.model, options.draft, options.dtype, options.rows)
    else:
        machine = {"width": options.width, "bandwidth": options.bandwidth, "operations": options.operations}
        rows = rows_up_to(options.rows)
        costs = {
            "verify": roofline(options.target, rows, **machine),
            "draft": roofline(options.draft, rows, **machine),
            "step": options.step,
        }
    write_whole(options.out, (json.dumps({"name": options.name, **costs}, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
