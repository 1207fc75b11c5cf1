"""`docs/architecture.md` says what the import contracts state and what is there."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
FLOORS = {
    room: floor
    for floor, layer in enumerate(next(one for one in CONTRACTS if one["name"].startswith("Floors"))["layers"])
    for room in layer.split(" | ")
}
UNNAMED = {"__main__", "noise", "version"}
"""An entry point, release 0.1's names of `rng`, and a number."""


def named(cell: str) -> list[str]:
    return [name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([\w/.]+)`", cell)]


TABLE = TEXT.split("| room |")[1].split("\n\n")[0].splitlines()[2:]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TABLE]
ROOMS = {room: named(row[-1]) for row in ROWS for room in named(row[0])}


def test_every_room_of_the_contracts_is_in_the_table() -> None:
    assert FLOORS.keys() - UNNAMED <= ROOMS.keys()


@pytest.mark.parametrize("room", [room for room in ROOMS if room in FLOORS])
def test_what_a_room_may_import_lies_below_it(room: str) -> None:
    below = [one for one in ROOMS[room] if one in FLOORS]
    assert all(FLOORS[one] >= FLOORS[room] for one in below)


def test_every_file_that_it_names_is_there() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    ends = {"/" + file for file in files}
    missing = [
        name for name in set(re.findall(r"[\w/]+\.py", TEXT)) if not any(end.endswith("/" + name) for end in ends)
    ]
    assert missing == []
