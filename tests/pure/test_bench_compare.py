"""Two results of the benchmark side by side."""

import csv
import io
import json
from pathlib import Path

import pytest

from tests.pure.benches import CELLS, CONFIGS, measured, rounds
from vllm_adaptive_tree.bench.compare import Results, compare, summary
from vllm_adaptive_tree.bench.results import rows, to_csv
from vllm_adaptive_tree.cli.compare import _side
from vllm_adaptive_tree.cli.main import main

DRIFT = [100.0, 50.0, 200.0, 100.0, 80.0, 100.0]


def run(folder: Path, found: list, **settings) -> Path:
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({"format": 2, "model": "m", **settings}))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(one.to_json()) + "\n" for one in found))
    return folder


def scaled(cell, tree: float, machine: float = 1.0) -> list:
    base = [machine * speed for speed in DRIFT]
    return rounds("s", cell, no_speculation=base, tree=[tree * speed for speed in base], chain_3=base)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The second machine is three times as fast; its trees gain more at one request, less at eight."""
    before = run(tmp_path / "before", scaled(CELLS[0], 1.5) + scaled(CELLS[1], 1.2), version="1")
    after = run(tmp_path / "after", scaled(CELLS[0], 1.8, 3.0) + scaled(CELLS[1], 1.1, 3.0), version="2")
    return before, after


def test_two_runs_are_compared_through_no_speculation(folders: tuple[Path, Path]) -> None:
    found = compare(*map(Results.read, folders), None)
    assert [(one.cell, one.first, one.second) for one in found] == [
        (cell.name, name, name) for cell in CELLS for name in ("tree", "chain 3")
    ]
    assert [one.speed.median for one in found] == pytest.approx([1.8 / 1.5, 1, 1.1 / 1.2, 1])
    assert [one.verdict for one in found] == [
        "B is faster",
        "no difference shown",
        "A is faster",
        "no difference shown",
    ]
    assert all(one.tokens.median == 1 for one in found)
    assert summary(found) == "B is faster in 1 of 4 comparisons, slower in 1"


def test_two_configurations_of_a_run_are_compared_round_by_round(folders: tuple[Path, Path]) -> None:
    one = Results.read(folders[0])
    found = compare(one, one, ("chain 3", "tree"))
    assert [tuple(round(value, 9) for value in one.speed) for one in found] == [(1.5, 1.5, 1.5, 6), (1.2, 1.2, 1.2, 6)]
    assert {one.verdict for one in found} == {"tree is faster"}


def test_of_other_prompts_tokens_are_not_compared(tmp_path: Path) -> None:
    few = [one for one in scaled(CELLS[0], 2.0) if one.number < 4]
    for one in few:
        one.measured["tree"] = measured(200, decode_tokens=60)
    runs = run(tmp_path / "a", few, prompts="x"), run(tmp_path / "b", scaled(CELLS[0], 2.0), prompts="y")
    (tree, _) = compare(*map(Results.read, runs), None)
    assert (tree.speed, tree.tokens, tree.verdict) == (None, None, "not in enough rounds beside no speculation")


def test_the_command(folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = map(str, folders)
    assert main(["compare", before, after]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == 'version: "1" in A, "2" in B'
    assert said[-1] == "B is faster in 1 of 4 comparisons, slower in 1"
    assert any("1.20 [1.20, 1.20]" in line and "B is faster" in line for line in said)
    assert main(["compare", f"{before}:chain 3", f"{before}:tree", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {}
    assert found["rows"][0]["speed"]["median"] == pytest.approx(1.5)
    for wrong, message in (
        ([before, str(tmp_path / "none")], "holds no results"),
        ([f"{before}:nobody", f"{after}:tree"], "no configuration 'nobody'; it has no speculation, tree, chain 3"),
        ([f"{before}:tree", after], "of both"),
    ):
        assert main(["compare", *wrong]) == 2
        assert message in capsys.readouterr().err
    assert _side(before) == (folders[0], None)


def test_rows_as_text() -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(rows(CELLS, CONFIGS, scaled(CELLS[0], 1.5))))))
    by_name = {line["config"]: line for line in lines}
    assert by_name["tree"]["to_base"] == "1.5"
    assert float(by_name["tree"]["tokens_per_second_low"]) <= float(by_name["tree"]["tokens_per_second"])
    assert by_name["no speculation"]["to_base"] == ""
    assert by_name["tree"]["cell"] == CELLS[0].name
