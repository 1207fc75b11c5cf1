"""Counts of the kernels, graphs and copies that the host starts in a step on a GPU, without a GPU."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.engine.engines import V2

pytestmark = pytest.mark.skipif(V2, reason="in a process of its own")

MOST, MOST_WITH_A_BLOCK = 60, 80
"""A head of one forward writes the K/V of its context by vLLM's own operations."""
AT_REST = 9
"""Launches of a step whose draft rests and whose look-up does not, beside those of vLLM's own."""
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
    block, head, sampled, learnt, resting, none, few, more = counted(
        ("opt_tree, DSpark head", None),
        *((case, None) for case in ("opt_tree, EAGLE-3 head", "dyspec, rrsw", "adaptive_tree")),
        *((case, None) for case in ("adaptive_tree at rest", "no speculation")),
        *(("opt_tree", layers) for layers in (1, 3)),
    )
    for row in (head, sampled, learnt, few, more):
        assert row["outside_total"] <= MOST, row
    assert block["outside_total"] <= MOST_WITH_A_BLOCK, block
    assert resting["outside_total"] <= none["outside_total"] + AT_REST, (resting, none)
    assert few["outside"] == more["outside"]
    assert few["inside_total"] < more["inside_total"], "what the layers start is in graphs"
