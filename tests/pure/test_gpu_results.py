"""benchmarks/results/gpu/README.md: its tables are those of the results that they name."""

import json
from typing import Any

from tests.documents import ROOT

FOLDER = ROOT / "benchmarks" / "results" / "gpu"
SHOWN = [1, 3.7], [2, 1]
"""Costs of the start that the page shows."""
GIB = 1 << 30


def rows_of(file: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((FOLDER / file).read_text())["rows"]
    return rows


def section(title: str) -> str:
    return (FOLDER / "README.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def table(title: str) -> list[str]:
    """Rows below the header."""
    return [line for line in section(title).splitlines() if line.startswith("| ")][2:]


def simulated() -> list[str]:
    return [
        f"| {row['device']}, {row['requests']} | {row['told'][0]:g}, {row['told'][1]:g} | "
        + " | ".join(f"{row[name]:.2f}" for name in ("right", "learnt", "ranks", "kept", "shared"))
        + " |"
        for row in rows_of("simulated.json")
        if row["told"] in SHOWN
    ]


def drafts() -> list[str]:
    found = []
    for row in rows_of("sizes.json")[0]["drafts"]:
        before, now = row["before"], row["now"]
        memory = [f"{before[name] / GIB:.2f} → {now[name] / GIB:.2f} GiB" for name in ("keys", "logits")]
        graphs = " → ".join(f"{one['graphs']} ({one['forwards']:,})" for one in (before, now))
        found.append(f"| {row['name']}, {row['nodes']} | {row['max_num_seqs']:,} | {' | '.join(memory)} | {graphs} |")
    return found


def prompts() -> list[str]:
    return [
        f"| {row['nodes']}, {row['requests']} | "
        + " | ".join(f"{row[name]:,}" for name in ("none", "before", "now"))
        + " |"
        for row in rows_of("sizes.json")[0]["prompts"]
    ]


def host() -> list[str]:
    one, many = (rows_of("host_time.json")[-1]["requests"][requests] for requests in ("1", "64"))
    return [f"| {part} | {one[part]:,.0f} | {many[part]:,.0f} |" for part in one]


def whole_steps() -> list[str]:
    requests = rows_of("host_step.json")[-1]["requests"]
    return [
        f"| {case} | "
        + " | ".join(f"{of[case]['microseconds']:,.0f} | {of[case]['function calls']:,.0f}" for of in requests.values())
        + " |"
        for case in requests["1"]
    ]


def chains() -> list[str]:
    return [
        f"| {row['draft']}, {row['lasting']} | {row['requests']} | "
        + " | ".join(f"{rate:.2f}" for rate in row["fixed"].values())
        + f" | {row['adaptive']:.2f} |"
        for row in rows_of("simulated_chains.json")
    ]


def test_wrong_costs_are_those_of_the_simulation() -> None:
    assert table("Wrong costs of the start") == simulated()
    for row in rows_of("simulated.json"):
        assert min(row["learnt"], row["ranks"]) > 0.95 * row["right"]


def test_sizes_are_those_that_were_computed() -> None:
    assert table("Graphs and memory by the size of the engine") == drafts()
    graphs = rows_of("sizes.json")[0]["graphs"]
    said = f"{graphs['before']:,} of {graphs['all']:,} fullest batches had no graph of the target, now {graphs['now']}"
    assert said in " ".join(section("Graphs and memory by the size of the engine").split())


def test_prompts_have_what_was_computed() -> None:
    assert table("What is left for prompts") == prompts()
    for row in rows_of("sizes.json")[0]["prompts"]:
        assert row["now"] >= 0.75 * row["none"]


def test_host_times_are_those_of_the_last_run() -> None:
    assert table("Host time of our Python") == host()


def test_whole_steps_are_those_of_the_last_run() -> None:
    assert table("Host time of a whole step") == whole_steps()
    for of in rows_of("host_step.json")[-1]["requests"].values():
        assert min(of, key=lambda case: of[case]["microseconds"]) == "no speculation"


def test_chains_are_those_of_the_simulation() -> None:
    """No fixed length is as good everywhere."""
    assert table("Chains of adaptive length") == chains()
    rows = rows_of("simulated_chains.json")
    assert all(row["adaptive"] >= 0.97 * max(1.0, *row["fixed"].values()) for row in rows)
    for length in rows[0]["fixed"]:
        assert min(row["fixed"][length] / row["adaptive"] for row in rows) < 0.8
