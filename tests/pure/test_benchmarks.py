"""docs/benchmarks.md is one page, and has every row of the results that its sections name."""

import json
import re
from typing import Any

import pytest

from tests.documents import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results" / "bench"
SECTIONS = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
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


def test_one_page() -> None:
    assert len(PAGE.read_text().splitlines()) <= 150
    assert len(SECTIONS) == 2
    assert all("**Where it loses.**" in section for section in SECTIONS)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_every_row_is_that_of_the_results(section: str) -> None:
    file = re.findall(r"\(\.\./benchmarks/results/bench/([\w.-]+)\)", section)[0]
    results = json.loads((RESULTS / file).read_text())
    assert file.startswith(f"{results['settings']['version']}-")
    shown = [tuple(line.strip("| ").split(" | ")) for line in section.splitlines() if line.startswith("| ")][2:]
    phases = results["bursty"] if "bursty" in results else results["swing"]  # release 0.1's key
    assert shown == [*map(steady, results["rows"]), *map(bursty, phases)]
