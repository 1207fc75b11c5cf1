"""docs/support-matrix.md: what it names exists, and what it allows or refuses names a test."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "support-matrix.md").read_text()
FILES = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
ROWS = [line.split("|")[1:-1] for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| ---")]


def test_tests_that_it_names_exist() -> None:
    named = set(re.findall(r"\btest_\w+\.py", TEXT))
    assert len(named) > 20
    assert named - FILES.keys() == set()
    sources = "\n".join(path.read_text() for path in FILES.values())
    missing = [name for name in re.findall(r"`(test_\w+)`", TEXT) if f"def {name}(" not in sources]
    assert missing == []


@pytest.mark.parametrize("row", [row for row in ROWS if len(row) == 3], ids=lambda row: row[0].strip()[:40])
def test_what_is_allowed_or_refused_has_a_test(row: list[str]) -> None:
    _, state, proof = row
    if state.strip().startswith(("allowed", "refused", "taken")):
        assert re.search(r"\btest_\w+|\btests/|make test|by vLLM", proof + state), row
