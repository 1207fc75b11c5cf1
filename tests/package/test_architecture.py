"""`docs/architecture.md` has every room of the import contracts, and every file that it names is there."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
[LAYERS] = [contract["layers"] for contract in CONTRACTS if contract["name"].startswith("Floors")]
UNNAMED = {"__main__", "version"}
"""An entry point, and a number."""


def test_every_room_of_the_contracts_is_in_the_table() -> None:
    table = TEXT.split("| room |")[1].split("\n\n")[0]
    named = {name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([\w/.]+)`", table)}
    rooms = {room for layer in LAYERS for room in layer.split(" | ")}
    assert rooms - UNNAMED - named == set()


def test_every_file_that_it_names_is_there() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    ends = {"/" + file for file in files}
    missing = [
        name for name in set(re.findall(r"\w[\w/]*\.py", TEXT)) if not any(end.endswith("/" + name) for end in ends)
    ]
    assert missing == []
