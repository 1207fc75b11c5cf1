"""The table of the tests that run on Model Runner V2 names tests that are there."""

import ast

import pytest

from tests import v2


@pytest.mark.parametrize("name", v2.SETS)
def test_files_and_tests_are_there(name: str) -> None:
    for cases in v2.SETS[name].values():
        for file, tests in cases.items():
            tree = ast.parse((v2.ROOT / v2.ENGINE / file).read_text())
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert {test.split("[")[0] for test in tests} <= functions, file


def test_a_file_or_its_tests() -> None:
    assert v2.names({"test_a.py": [], "test_b.py": ["test_c[d]"]}) == [
        "tests/engine/test_a.py",
        "tests/engine/test_b.py::test_c[d]",
    ]
