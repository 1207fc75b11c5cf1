"""Writes and shows what the rounds say."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_adaptive_tree.bench import tables
from vllm_adaptive_tree.bench.first import first_rows
from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.plots import draw
from vllm_adaptive_tree.bench.projection import Costs, project
from vllm_adaptive_tree.bench.results import rows, swing_rows, to_json
from vllm_adaptive_tree.bench.rounds import Round
from vllm_adaptive_tree.files import atomic_write


def report(
    folder: Path,
    settings: Mapping[str, Any],
    cells: Sequence[Cell],
    configs: Sequence[Config],
    rounds: Sequence[Round],
    costs: Sequence[Costs],
    failures: Mapping[str, str],
    first: Sequence[Cell] = (),
) -> None:
    """results.json, results.md and the plots in `folder`, and the tables on the console."""
    steady, swing = rows(cells, configs, rounds), swing_rows(cells, configs, rounds)
    beginnings = first_rows(first, configs, rounds)
    projections = {one.name: project(one, cells, configs, steady) for one in costs}
    data = to_json(settings, steady, swing, failures)
    data["first_steps"] = [one.to_json() for one in beginnings]
    data["projections"] = {name: [one._asdict() for one in projected] for name, projected in projections.items()}
    tabled = [
        *tables.tables(steady, swing),
        *tables.first(beginnings),
        *(tables.projection(*item) for item in projections.items()),
    ]
    notes = tables.notes(steady)
    atomic_write(folder / "results.json", (json.dumps(data, indent=2) + "\n").encode())
    atomic_write(folder / "results.md", tables.markdown(settings, tabled, notes, failures).encode())
    tables.show(Console(highlight=False, soft_wrap=True), settings, tabled, notes)
    try:
        draw(folder, cells, configs, steady)
    except ImportError as error:
        print(error, file=sys.stderr)
    print(f"{folder}: results.json, results.md and the plots are written", file=sys.stderr)
