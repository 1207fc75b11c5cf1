"""`benchmarks.gpu.tree_operations` counts what a step starts, without a device: it launches no kernel."""

from typing import Any

import pytest
import torch

from benchmarks.gpu.tree_operations import CASES, Case, operations

LAUNCHED = ("target_only", "rrsw", "traversal")
"""Rules with kernels."""


@pytest.mark.parametrize(("method", "rule", "tree"), [case for case in CASES if case[1] in LAUNCHED])
def test_kernels_take_the_place_of_operations(method: str, rule: str, tree: dict[str, Any]) -> None:
    pool = torch.empty(1, 9, 64, device="meta")
    counts = []
    for fused in (True, False):
        case = Case.of(method, rule, tree, pool, 8, fused)
        _, (drawn, _) = operations(case.draft)
        accepting, _ = operations(lambda: case.accept(drawn))  # noqa: B023  called at once
        counts.append(accepting)
    assert 0 < counts[0] < counts[1]
