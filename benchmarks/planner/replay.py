"""Budgets, constant trees and no drafts on recorded trees, under simulated loads and costs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.planner.policies import Auto, Fixed, Policy
from benchmarks.planner.recording import Recording
from benchmarks.planner.simulation import Machine, Row, Workload, expected, simulate
from vllm_adaptive_tree import bench
from vllm_adaptive_tree.bench.projection import read_hardware
from vllm_adaptive_tree.budget import Costs

NEVER = Fixed(0)
CONSTANTS = {
    "chain 3": Fixed(3, 2, chain=True),
    "chain 5": Fixed(5, 4, chain=True),
    "tree 8": Fixed(8, 3),
    "tree 24": Fixed(24, 5),
}
CHOICES = [
    *(Fixed(length, length - 1, chain=True) for length in (1, 2, 3, 5, 7)),
    *(Fixed(nodes, levels) for nodes in (2, 4, 8, 16, 24) for levels in (0, 1, 2, 3, 5, 8)),
]
"""Of the oracle, and no drafts."""


class Result(NamedTuple):
    """Of one row; all tokens per second are relative to no drafts."""

    row: Row
    rates: dict[str, list[float]]  # of each policy, by seed
    constants: dict[str, float]
    oracle: float  # the best constant in hindsight
    microseconds: dict[str, float]  # of host time per step, of each policy


MakePolicy = Callable[[Costs, bool], Policy]
"""From the profile of the machine, and whether children are sampled."""
POLICIES: dict[str, MakePolicy] = {"auto": Auto}
SWING = (2, 32) * 3


def _arrivals(phases: int = 16, most: int = 32) -> tuple[int, ...]:
    """Requests that come and go: a random walk over the logarithm of their number."""
    walk = np.random.default_rng(0).normal(0, 0.8, phases).cumsum() + math.log(4)
    return tuple(np.exp(walk).round().clip(1, most).astype(int).tolist())


WORKLOADS = [
    Workload("1 greedy", (1,)),
    Workload("2 sampled", (2,), 0.0),
    Workload("4 half", (4,), 0.5),
    Workload("8 greedy", (8,)),
    Workload("8 sampled", (8,), 0.0),
    Workload("16 half", (16,), 0.5),
    Workload("32 greedy", (32,)),
    Workload("arrivals half", _arrivals(), 0.5),
    Workload("swing greedy", SWING),
]
OFF = {"verify x 1.5": (1.5, 1.0), "draft x 3": (1.0, 3.0)}
"""Factors of the costs that a policy is given at first; on one workload of each machine."""


def machines() -> list[Machine]:
    """Machines of the package's cost files, and `plateau.json`."""
    curves = Path(bench.__file__).parent / "curves"
    files = [*sorted(curves.glob("*.json")), Path(__file__).with_name("plateau.json")]
    found = {file.stem: read_hardware(file) for file in files}
    return [Machine(name, one.costs.verify, one.costs.draft, one.step) for name, one in found.items()]


def rows(recordings: Sequence[Recording], workloads: Sequence[Workload] = WORKLOADS) -> list[Row]:
    """Every recording under every workload on every machine, and two beliefs that are off at first."""
    found = []
    for recording in recordings:
        for machine in machines():
            found += [Row(recording, workload, machine) for workload in workloads]
            for name, off in OFF.items():
                told = replace(machine, name=f"{machine.name}, told {name}", off=off)
                found.append(Row(recording, workloads[len(workloads) // 2], told))
    return found


def compare(
    policies: Mapping[str, MakePolicy], rows: Sequence[Row], *, seeds: int = 3, steps: int = 300
) -> list[Result]:
    """Every policy on every row."""
    results = []
    for row in rows:
        never, sampled = expected(row, NEVER), row.recording.sampled
        rates, own = dict[str, list[float]](), dict[str, float]()
        for name, make in policies.items():
            runs = [
                simulate(row, make(row.machine.profile(), sampled), seed=seed, steps=steps) for seed in range(seeds)
            ]
            rates[name] = [run.rate / never for run in runs]
            own[name] = 1e6 * sum(run.own for run in runs) / sum(run.steps for run in runs)
        constants = {name: expected(row, one) / never for name, one in CONSTANTS.items()}
        oracle = max(1.0, *(expected(row, one) / never for one in CHOICES))
        results.append(Result(row, rates, constants, oracle, own))
    return results


def table(results: Sequence[Result]) -> str:
    """All rows, and a summary; tokens per second relative to no drafts, of policies as mean [least, most]."""
    policies, constants = list(results[0].rates), list(results[0].constants)
    cells = [["recording", "requests", "machine", *policies, *constants, "oracle"]]
    for (recording, workload, machine), rates, fixed, oracle, _ in results:
        spread = [f"{np.mean(one):.2f} [{min(one):.2f}, {max(one):.2f}]" for one in rates.values()]
        cells.append(
            [recording.name, workload.name, machine.name, *spread, *(f"{one:.2f}" for one in (*fixed.values(), oracle))]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    best = np.array([max(1.0, *one.constants.values()) for one in results])
    columns = {name: np.array([np.mean(one.rates[name]) for one in results]) for name in policies}
    columns |= {name: np.array([one.constants[name] for one in results]) for name in constants}
    columns["oracle"] = np.array([one.oracle for one in results])
    for name, found in columns.items():
        worst, mean = int((found / best).argmin()), np.exp(np.log([found, found / columns["oracle"]]).mean(1))
        lines.append(
            f"{name}: geometric mean {mean[0]:.3f}, {mean[1]:.3f} of the oracle; worst {(found / best)[worst]:.3f} "
            f"of the best of no drafts and the constants: {', '.join(cells[1 + worst][:3])}"
        )
    for name in policies:
        lines.append(f"{name}: {np.mean([one.microseconds[name] for one in results]):.0f} us a step")
    return "\n".join(lines)
