"""docs/benchmarks.md: its rows are those of the results that its sections name."""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import smollm2_speed as speed
from tests.documents import ROOT
from tools import temperatures

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results" / "bench"
TREES = "adaptive_tree", "adaptive_tree, no look-up"


def estimate(value: dict[str, float]) -> str:
    return "{median:.2f} [{low:.2f}, {high:.2f}]".format_map(value)


def rows_of(file: str, method: str) -> dict[str, dict[str, Any]]:
    """Rows of a method, by their cells."""
    return {row["cell"]: row for row in json.loads((RESULTS / file).read_text())["rows"] if row["config"] == method}


def test_the_enlarged_pair_is_that_of_its_results() -> None:
    section = " ".join(PAGE.read_text().split("## The bundled pair, enlarged\n")[1].split("\n## ")[0].split())
    new = rows_of("enlarged.json", "adaptive_tree") | rows_of("enlarged_one.json", "adaptive_tree")
    cells = [new[f"offline {load}"] for load in ("1 T=0", "8 T=0", "1 sampled")]
    head = rows_of("enlarged_head.json", "adaptive_tree")
    cells += [head[f"offline 1 {law}"] for law in ("T=0", "sampled")]
    ratios = [f"{estimate(row['to_base'])} and {estimate(row['to_best_chain'])}" for row in cells]
    assert re.findall(r"\d\.\d\d \[[^]]*\] and \d\.\d\d \[[^]]*\]", section) == ratios


def test_every_speed_on_smollm2_is_shown() -> None:
    rows = json.loads((RESULTS.parent / "smollm2_speed.json").read_text())["rows"]
    section = PAGE.read_text().split("Speed relative to no speculation")[1].split("\n## ")[0]
    shown = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    assert shown[2:] == speeds_on_smollm2(rows)


def speeds_on_smollm2(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Cells of the page: the load, tokens per second of no speculation, and of the others the ratios to it."""
    found = {(row["requests"], row["temperature"], row["configuration"]): row for row in rows}
    chains = [name for name in speed.CONFIGURATIONS if "chain" in name]
    lines = []
    for load in sorted({key[:2] for key in found}):
        best = (max(found[*load, name][part]["ratio"] for name in chains) for part in ("cold", "warm"))
        tree, without = ([found[*load, name][part] for part in ("cold", "warm")] for name in TREES)
        lines.append(
            [
                f"{load[0]}, {load[1]:g}",
                f"{found[*load, speed.PLAIN]['warm']['rate']:.0f}",
                ", ".join(f"{ratio:.2f}" for ratio in best),
                ", ".join("{ratio:.2f} [{low:.2f}, {high:.2f}]".format_map(one) for one in tree),
                ", ".join(f"{one['ratio']:.2f}" for one in without),
            ]
        )
    return lines


def smollm2_row(results: list[dict[str, Any]], configuration: str) -> str:
    """Tokens per step of a configuration, by prompts and temperature, as the page shows them."""
    found = {(row["prompts"], row["temperature"]): row for row in results if row["configuration"] == configuration}
    cells = [found[kind, temperature] for kind in ("HumanEval", "chat") for temperature in (0.0, 0.7, 1.0)]
    shown = [f"{row['tokens_per_step']:.2f} ± {row['standard_error']:.2f}" for row in cells]
    return " | ".join([configuration.removesuffix(", 24 nodes"), *shown])


def test_every_configuration_of_smollm2_is_shown_and_changed_no_greedy_text() -> None:
    results = json.loads((RESULTS.parent / "smollm2.json").read_text())["rows"]
    section = PAGE.read_text().split("## SmolLM2\n")[1].split("\n## ")[0]
    shown = [line.strip("| ") for line in section.splitlines() if line.startswith("| ")]
    configurations = {row["configuration"]: None for row in results}
    del configurations["no speculation"]
    assert len(configurations) >= 6
    assert [smollm2_row(results, name) for name in configurations] == [row for row in shown if "±" in row]
    assert {row["equal_texts"] for row in results if row["temperature"] == 0} == {16}


def test_the_picture_is_of_the_results(tmp_path: Path) -> None:
    rows = json.loads(temperatures.RESULTS.read_text())["rows"]
    found = temperatures.curves(rows, "chat")
    assert {len(curve) for curve in found.values()} == {3}
    chains = [row["tokens_per_step"] for row in rows if row["prompts"] == "chat" and "chain of" in row["configuration"]]
    assert max(tokens for _, tokens, _ in found[temperatures.CHAIN]) == max(chains)
    temperatures.draw(rows, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == temperatures.FIGURE.read_text(), "run python -m tools.temperatures"
