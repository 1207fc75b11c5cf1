"""docs/benchmarks.md: its rows are those of the results that its sections name."""

import json
import re
from typing import Any

import pytest

from tests.documents import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results" / "bench"
SECTIONS = [text for text in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE) if text.startswith("With")]
STRESS = {"random draft": "opt_tree, random draft", "self draft": "opt_tree, self draft"}
NONE = "\u2013"


def estimate(value: dict[str, float] | None, digits: int) -> str:
    return "{median:.{0}f} [{low:.{0}f}, {high:.{0}f}]".format(digits, **value) if value else NONE


def method(config: str) -> str:
    return STRESS.get(config) or config.replace("chain ", "chain of ")


def steady(row: dict[str, Any]) -> tuple[str, ...]:
    place, requests, law = row["cell"].split()
    load = requests + ", sampled" * (law == "sampled") + ", server" * (place == "server")
    chain = estimate(row["to_best_chain"], 2) + (f" ({row['best_chain'].split()[1]})" if row["to_best_chain"] else "")
    speeds = estimate(row["tokens_per_second"], 1), estimate(row["to_base"], 2), chain
    return load, method(row["config"]), *speeds, f"{row['tokens_per_step']:.2f}", f"{row['nodes_per_step']:.1f}"


def bursty(row: dict[str, Any]) -> tuple[str, ...]:
    base, chain = NONE, NONE
    if row["to_best_fixed"] and row["best_fixed"] == "no speculation":
        base = estimate(row["to_best_fixed"], 2)
    elif row["to_best_fixed"]:
        chain = f"{estimate(row['to_best_fixed'], 2)} ({row['best_fixed'].split()[1]})"
    speed = estimate(row["tokens_per_second"], 1)
    return f"phases of {row['concurrency']}", method(row["config"]), speed, base, chain, NONE, NONE


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_rows_are_those_of_the_results_and_no_tree_is_left_out(section: str) -> None:
    file = re.findall(r"\(\.\./benchmarks/results/bench/([\w.-]+)\)", section)[0]
    results = json.loads((RESULTS / file).read_text())
    assert file.startswith(f"{results['settings']['version']}-")
    shown = [tuple(line.strip("| ").split(" | ")) for line in section.splitlines() if line.startswith("| ")][2:]
    measured = [*map(steady, results["rows"]), *map(bursty, results["bursty"])]
    assert shown == [row for row in measured if row in shown]
    assert [row for row in measured if row[1].startswith("opt_tree") and row not in shown] == []


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
