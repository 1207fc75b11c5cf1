"""Counts of the kernels, graphs and copies that the host starts in a step on a GPU, without a GPU."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.engine.engines import V2

pytestmark = pytest.mark.skipif(V2, reason="in a process of its own")

MOST = 60
AT_REST = 9, 12
"""Launches of a step whose draft rests and whose look-up does not, beside those of vLLM's own: of a model, and of a
head, whose states are kept."""
CALLS = 400
"""Of this package's functions in a step."""
COUNT = """
import json, sys
from benchmarks.gpu import launches
count = launches.Count()
launches.install(count)
rows = [launches.measured(count, case, launches.Sizes(6, 2, 6, layers)) for case, layers in json.loads(sys.argv[1])]
print("ROWS" + json.dumps(rows))
"""


def counted(*cases: tuple[str, int | None]) -> list[dict[str, Any]]:
    """Of cases with so many layers of both models; None: the bundled ones."""
    command = [sys.executable, "-c", COUNT, json.dumps(cases)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in found.stdout.splitlines() if line.startswith("ROWS")]
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(lines[-1].removeprefix("ROWS"))
    return rows


def test_a_step_starts_few_whatever_the_layers() -> None:
    block, head, sampled, learnt, resting, waiting, none, few, more = counted(
        *((case, None) for case in ("opt_tree, DSpark head", "opt_tree, EAGLE-3 head", "dyspec, rrsw")),
        *((case, None) for case in ("adaptive_tree", "adaptive_tree at rest", "adaptive_tree at rest, DSpark head")),
        ("no speculation", None),
        *(("opt_tree", layers) for layers in (1, 3)),
    )
    for row in (block, head, sampled, learnt, few, more):
        assert row["outside_total"] <= MOST, row
    for row, more_than_none in zip((resting, waiting), AT_REST, strict=True):
        assert row["outside_total"] <= none["outside_total"] + more_than_none, (row, none)
    for row in (block, head, sampled, learnt, resting, waiting, few, more):
        assert 0 < row["calls"] <= CALLS, row
    assert none["calls"] <= 10, "wrapped functions pass on what is not ours"
    assert few["outside"] == more["outside"]
    assert few["inside_total"] < more["inside_total"], "what the layers start is in graphs"
