"""Writes the table of target classes in `docs/support-matrix.md`, from `vllm_adaptive_tree/engine/targets/families.py`.

python -m tools.families    # writes it
"""

import re
from pathlib import Path

from vllm_adaptive_tree.engine.targets.families import FAMILIES, REFUSALS

FILE = Path(__file__).parents[1] / "docs" / "support-matrix.md"
BEGIN, END = "<!-- written by `python -m tools.families` -->", "<!-- end -->"


def table() -> str:
    lines = ["| vLLM's class | state | test: of `test_families.py`, chains `test_hybrids.py` |", "| --- | --- | --- |"]
    for one in FAMILIES:
        names = ", ".join(f"`{name}`" for name in one.tests)
        lines.append(f"| `{one.architecture}` ({one.examples}): {one.brings} | allowed | {names} |")
    for refusal in REFUSALS:
        lines.append(f"| {refusal.what} ({refusal.examples}) | refused: {refusal.reason} | {refusal.test} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """Page with the current table."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    assert re.search(f"{re.escape(BEGIN)}.*{re.escape(END)}", FILE.read_text(), re.DOTALL)
    FILE.write_text(written(FILE.read_text()))
