"""The first steps of an engine that begins cold, beside one that begins with what an earlier process has learnt."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.rounds import Round, Store
from vllm_adaptive_tree.bench.schedule import Engine
from vllm_adaptive_tree.bench.statistics import Estimate, Rounds, median, ratio

LEARNING = 8
"""Rounds of the engine that learns for the warm ones."""
COLD, WARM = "cold", "warm"


@dataclass(frozen=True, slots=True)
class FirstRow:
    config: str
    cell: str
    rounds: int
    cold: Estimate  # tokens per second of the first steps
    warm: Estimate
    to_cold: Estimate | None

    def to_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in (COLD, WARM, "to_cold")}
        estimates = {name: value and value._asdict() for name, value in found.items()}
        return {"config": self.config, "cell": self.cell, "rounds": self.rounds, **estimates}


def measure_first(
    cell: Cell,
    config: Config,
    store: Store,
    rounds: int,
    start: Callable[[Config], Engine],
    go_on: Callable[[], bool],
) -> None:
    """Every missing round: an engine that knows nothing and one that has learnt, in turn, each in a process of its own.
    No round begins unless `go_on` says so."""
    missing = sorted(set(range(1, rounds + 1)) - store.numbers(stage(config), cell.name))
    if not missing or not go_on():
        return
    files = store.folder / "profiles"
    files.mkdir(exist_ok=True)
    learnt, file = files / f"{config.name} learnt.json", files / f"{config.name}.json"
    own = _with_profile(config, file)
    if not learnt.exists():
        file.unlink(missing_ok=True)
        engine = start(own)
        try:
            for number in range(LEARNING):
                engine.measure(cell, -1 - number)
        finally:
            engine.close()
        file.replace(learnt)
    for number in missing:
        found = {}
        for kind in (COLD, WARM) if number % 2 else (WARM, COLD):
            if not go_on():
                return
            file.unlink(missing_ok=True)
            if kind == WARM:
                shutil.copyfile(learnt, file)
            engine = start(own)
            try:
                found[kind] = engine.measure(cell, number)
            finally:
                engine.close()
        store.add(Round(stage(config), cell.name, number, found))


def stage(config: Config) -> str:
    return f"first steps: {config.name}"


def first_rows(cells: Sequence[Cell], configs: Sequence[Config], rounds: Sequence[Round]) -> list[FirstRow]:
    found = []
    for cell in cells:
        for config in configs:
            mine = [one for one in rounds if one.stage == stage(config) and one.cell == cell.name]
            cold, warm = (_speeds(mine, kind) for kind in (COLD, WARM))
            both = median(cold), median(warm)
            if both[0] is not None and both[1] is not None:
                found.append(FirstRow(config.name, cell.name, len(mine), both[0], both[1], ratio(warm, cold)))
    return found


def _speeds(rounds: Sequence[Round], kind: str) -> Rounds:
    return {one.number: one.measured[kind].tokens / one.measured[kind].seconds for one in rounds}


def _with_profile(config: Config, file: Path) -> Config:
    assert config.speculation is not None
    tree = {**config.speculation.get("tree", {}), "cost_profile": str(file)}
    return replace(config, speculation={**config.speculation, "tree": tree})
