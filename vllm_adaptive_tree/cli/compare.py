"""Compare two results of `vllm-adaptive-tree bench`: the folders of two runs, or two configurations of one or two.

Ratios are of B to A, with 90 % intervals. Two runs are compared through no speculation, which both have to have: what
changes the machine changes that, too.
"""

import argparse
import json
from pathlib import Path

EXAMPLES = ("before after", 'results:"chain 3" results:adaptive_tree --json')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("A", "B"):
        parser.add_argument(name, type=_side, help="a folder of `bench --out`, or FOLDER:CONFIGURATION")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    from vllm_adaptive_tree.bench import tables
    from vllm_adaptive_tree.bench.compare import Compared, Results, compare, differing, summary
    from vllm_adaptive_tree.bench.statistics import Estimate

    (folder, first), (other, second) = options.A, options.B
    if (first is None) != (second is None):
        raise ValueError("give the configuration of both, as FOLDER:CONFIGURATION, or of none")
    runs = Results.read(folder), Results.read(other)
    found = compare(*runs, None if first is None else (first, second))
    settings = differing(*runs)
    if options.json:
        rows = [
            {name: value._asdict() if isinstance(value, Estimate) else value for name, value in one._asdict().items()}
            for one in found
        ]
        print(json.dumps({"settings": settings, "rows": rows, "summary": summary(found)}, indent=1))
        return 0
    columns: tables.Columns[Compared] = {
        "cell": lambda one: one.cell,
        "A": lambda one: one.first,
        "B": lambda one: one.second,
        "tokens/s, B to A": lambda one: tables.estimate(one.speed, 2),
        "tokens/step, B to A": lambda one: tables.estimate(one.tokens, 2),
        "verdict": lambda one: one.verdict,
    }
    for name, (here, there) in settings.items():
        print(f"{name}: {json.dumps(here)} in A, {json.dumps(there)} in B")
    tables.print_tables([tables.table(f"A: {folder}, B: {other}", columns, found)])
    print(summary(found))
    return 0


def _side(text: str) -> tuple[Path, str | None]:
    folder, colon, config = text.rpartition(":")
    if Path(text).is_dir() or not colon:
        return Path(text), None
    return Path(folder), config
