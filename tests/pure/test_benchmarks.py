"""docs/benchmarks.md: its rows are those of the results that its sections name."""

import json
from pathlib import Path
from typing import Any

from tests.documents import ROOT
from tools import temperatures

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results" / "bench"


def estimate(value: dict[str, float]) -> str:
    return "{median:.2f} [{low:.2f}, {high:.2f}]".format_map(value)


def of_the_enlarged_pair(row: dict[str, Any]) -> str:
    chain = f"{estimate(row['to_best_chain'])} ({row['best_chain'].split()[1]})"
    _, requests, law = row["cell"].split()
    load = requests + ", sampled" * (law == "sampled")
    return " | ".join([load, estimate(row["to_base"]), chain])


def test_no_load_of_the_enlarged_pair_is_left_out() -> None:
    results = json.loads((RESULTS / "0.1.0-cpu-amx.json").read_text())
    section = PAGE.read_text().split("## The bundled pair, enlarged\n")[1].split("\n## ")[0]
    shown = [line.strip("| ") for line in section.splitlines() if line.startswith("| ")][2:]
    offline = [row for row in results["rows"] if row["cell"].startswith("offline")]
    trees = [row for row in offline if row["config"] == "opt_tree"]
    assert len(trees) == 6
    assert shown == [of_the_enlarged_pair(row) for row in trees]
    drafts = [row["to_base"]["median"] for row in offline if row["config"].startswith(("random", "self"))]
    assert drafts
    assert min(drafts) >= 0.99


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
