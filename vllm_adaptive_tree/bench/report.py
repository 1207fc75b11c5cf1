"""Report of a run: files and console output."""

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
from vllm_adaptive_tree.bench.projection import Hardware, project
from vllm_adaptive_tree.bench.results import bursty_rows, rows, to_csv, to_json
from vllm_adaptive_tree.bench.rounds import Round
from vllm_adaptive_tree.bench.statistics import row_to_json
from vllm_adaptive_tree.files import atomic_write


def report(
    folder: Path,
    settings: Mapping[str, Any],
    cells: Sequence[Cell],
    configs: Sequence[Config],
    rounds: Sequence[Round],
    hardware: Sequence[Hardware],
    failures: Mapping[str, str],
    first: Sequence[Cell] = (),
    *,
    as_json: bool = False,
) -> None:
    """Write results.json, .csv, .md and the plots to `folder`, and the tables, or the JSON, to the console."""
    steady, bursts = rows(cells, configs, rounds), bursty_rows(cells, configs, rounds)
    first_steps = first_rows(first, configs, rounds)
    projections = {one.name: project(one, cells, configs, steady) for one in hardware}
    data = to_json(settings, steady, bursts, failures)
    data["first_steps"] = [row_to_json(row) for row in first_steps]
    data["projections"] = {name: [one._asdict() for one in projected] for name, projected in projections.items()}
    tabled = [
        *tables.speed(cells, steady),
        *tables.steps(cells, steady),
        *tables.bursty(bursts),
        *tables.first(first_steps),
        *(tables.projection(*item) for item in projections.items()),
    ]
    notes = [tables.SPEED_NOTE, tables.TOKENS_NOTE, tables.STEP_NOTE, *tables.warnings(steady)]
    text = json.dumps(data, indent=2) + "\n"
    atomic_write(folder / "results.json", text.encode())
    atomic_write(folder / "results.csv", to_csv(steady).encode())
    atomic_write(folder / "results.md", tables.markdown(settings, tabled, notes, failures).encode())
    if as_json:
        print(text, end="")
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.width = max(console.width, tables.MIN_WIDTH)
        tables.show(console, settings, tabled, notes)
    written = "written are results.json, .csv and .md"
    try:
        draw(folder, cells, configs, steady)
    except ImportError as error:
        print(error, file=sys.stderr)
    else:
        written += ", and the plots"
    print(f"{folder}: {written}", file=sys.stderr)
