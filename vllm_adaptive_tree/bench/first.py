"""First steps of a cold engine, compared with those of one that starts from an earlier process's profile."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.rounds import Round, Store
from vllm_adaptive_tree.bench.schedule import Engine
from vllm_adaptive_tree.bench.statistics import Estimate, median, ratio

LEARNING_ROUNDS = 8
"""Rounds of the engine from which the warm ones learn."""
COLD, WARM = "cold", "warm"


@dataclass(frozen=True, slots=True)
class FirstRow:
    config: str
    cell: str
    rounds: int
    cold: Estimate  # tokens per second of the first steps
    warm: Estimate
    to_cold: Estimate | None


def measure_first(
    cell: Cell,
    config: Config,
    store: Store,
    rounds: int,
    start: Callable[[Config], Engine],
    proceed: Callable[[], bool],
) -> None:
    """Run every missing round: a cold engine and a warm one in turn, each in a new process. No round begins unless
    `proceed` returns True."""
    missing = sorted(set(range(1, rounds + 1)) - store.numbers(stage(config), cell.name))
    if not missing or not proceed():
        return
    files = store.folder / "profiles"
    files.mkdir(exist_ok=True)
    learnt, file = files / f"{config.name} learnt.json", files / f"{config.name}.json"
    own = _with_profile(config, file)
    if not learnt.exists():
        file.unlink(missing_ok=True)
        with closing(start(own)) as engine:
            for number in range(LEARNING_ROUNDS):
                engine.measure(cell, -1 - number)
        file.replace(learnt)
    for number in missing:
        found = {}
        for kind in (COLD, WARM) if number % 2 else (WARM, COLD):
            if not proceed():
                return
            file.unlink(missing_ok=True)
            if kind == WARM:
                shutil.copyfile(learnt, file)
            with closing(start(own)) as engine:
                found[kind] = engine.measure(cell, number)
        store.add(Round(stage(config), cell.name, number, found))


def stage(config: Config) -> str:
    return f"first steps: {config.name}"


def first_rows(cells: Sequence[Cell], configs: Sequence[Config], rounds: Sequence[Round]) -> list[FirstRow]:
    found = []
    for cell, config in product(cells, configs):
        measured = [one for one in rounds if one.stage == stage(config) and one.cell == cell.name]
        cold, warm = ({one.number: one.measured[kind].speed for one in measured} for kind in (COLD, WARM))
        if (cold_median := median(cold)) and (warm_median := median(warm)):
            row = FirstRow(config.name, cell.name, len(measured), cold_median, warm_median, ratio(warm, cold))
            found.append(row)
    return found


def _with_profile(config: Config, file: Path) -> Config:
    assert config.speculation is not None
    tree = {**config.speculation.get("tree", {}), "cost_profile": str(file)}
    return replace(config, speculation={**config.speculation, "tree": tree})
