"""Pages that name tests: these exist, and what the support matrix allows or refuses has one."""

import ast
import re
from pathlib import Path

import pytest

from tests.engine.families import FAMILIES

ROOT = Path(__file__).parents[2]
PAGES = "docs/support-matrix.md", "docs/operation.md", "tests/engine/reports.md"
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
FOLDERS = "tests/engine/", "tests/config/"
"""Folders of files without one, and of tests without a file."""
TESTS = {
    path.relative_to(ROOT).as_posix(): {
        node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
    }
    for path in (ROOT / "tests").rglob("test_*.py")
}
"""File -> functions."""


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.search(r"\btest_\w", line)]


def files(text: str) -> list[str]:
    return re.findall(r"(?:tests/(?:\w+/)*)?\btest_[\w*]+\.py", text)


def paths(name: str) -> set[str]:
    """Files that a name, with or without its folder, may stand for."""
    patterns = [name] if "/" in name else [folder + name for folder in FOLDERS]
    return {path for path in TESTS for pattern in patterns if Path(path).match(pattern)}


def functions(text: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", text)


def missing(text: str) -> list[str]:
    """Of the files and tests that a line names, those that are not there: a test has to be in a file that the line
    names, or in one of `FOLDERS`."""
    named = {name: paths(name) for name in files(text)}
    searched = {path for path in TESTS if path.startswith(FOLDERS)}.union(*named.values())
    found = [name for name, matches in named.items() if not matches]
    found += [folder for folder in re.findall(r"`(tests/\w+)`", text) if not (ROOT / folder).is_dir()]
    return found + [name for name in functions(text) if not any(name in TESTS[path] for path in searched)]


@pytest.mark.parametrize("page", TEXTS)
def test_tests_that_it_names_exist(page: str) -> None:
    said = lines(TEXTS[page])
    assert [(line, names) for line in said if (names := missing(line))] == []
    assert len({name for line in said for name in (*files(line), *functions(line))}) > 12


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("`test_server.py`, `test_interface.py`, `tests/ray/test_serve.py`, `test_v2_*.py`, `tests/cuda`", []),
        ("`tests/engine/test_interface.py`", ["tests/engine/test_interface.py"]),
        ("`test_serve.py`", ["test_serve.py"]),
        ("`tests/ray/test_server.py`, `tests/gpu`", ["tests/ray/test_server.py", "tests/gpu"]),
        ("`tests/pure/test_static_tree.py` (`test_siblings_differ`), `test_async_llm`", []),
        ("`test_siblings_differ`, `tests/pure/test_config.py`", ["test_siblings_differ"]),
    ],
)
def test_what_is_missing(line: str, names: list[str]) -> None:
    assert missing(line) == names


ROWS = [line.split("|")[1:-1] for line in TEXTS[PAGES[0]].splitlines() if re.match(r"\| (?!---)", line)]


@pytest.mark.parametrize("row", [row for row in ROWS if len(row) == 3], ids=lambda row: row[0].strip()[:40])
def test_what_is_allowed_or_refused_has_a_test(row: list[str]) -> None:
    _, state, proof = row
    if state.strip().startswith(("allowed", "refused", "taken")):
        models = set(re.findall(r"`([^`]+)`", proof))  # whose tests the head of their table names
        named = re.search(r"\btest_\w+|\btests/|make test|by vLLM", proof + state)
        assert named or (models and models <= FAMILIES.keys()), row
