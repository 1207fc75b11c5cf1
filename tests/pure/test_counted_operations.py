"""`benchmarks.gpu.tree_operations` counts what a step starts, without a device: it launches no kernel."""

from typing import Any

import pytest
import torch

from benchmarks.gpu.tree_operations import CASES, Case, operations

LAUNCHED = ("target_only", "rrsw", "traversal")
"""Rules with kernels."""
GROWN = ("adaptive_tree", "opt_tree", "eagle2", "dyspec")
"""Methods with kernels."""
MOST_OF_A_LEVEL, MOST_BESIDES = 32, 16


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


@pytest.mark.parametrize(("method", "rule", "tree"), [case for case in CASES if case[0] in GROWN])
def test_a_level_starts_few(method: str, rule: str, tree: dict[str, Any]) -> None:
    case = Case.of(method, rule, tree, torch.empty(1, 9, 64, device="meta"), 8, True)
    drafting, _ = operations(case.draft)
    assert drafting <= MOST_BESIDES + MOST_OF_A_LEVEL * case.levels
