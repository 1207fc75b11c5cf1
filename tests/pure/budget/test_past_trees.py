"""Trees that the planner remembers."""

import numpy as np
import pytest

from vllm_adaptive_tree.budget.acceptance_model import Calibration
from vllm_adaptive_tree.budget.past_trees import TREES, PastTrees


def test_a_deep_node_is_weighed_by_the_trees_that_were_as_deep() -> None:
    """Three trees of one level say nothing about the second."""
    past = PastTrees()
    for levels in (1, 2, 1, 1):
        depth = np.arange(1, 1 + levels)[None]
        past.append(np.full(depth.shape, 0.5), depth, depth, levels=levels)
    nodes = past.nodes(Calibration())
    assert nodes.level.tolist() == [1, 1, 2, 1, 1]
    assert nodes.weight.tolist() == [0.25, 0.25, 1, 0.25, 0.25]


def test_a_tree_that_ended_before_its_last_level_counts_there() -> None:
    past = PastTrees()
    for value in ([0.9, 0.5], [0.9, 0.0]):
        past.append(np.array([value]), np.array([[1, 2]]), np.array([[1, 2]]), levels=2)
    assert past.nodes(Calibration()).weight.tolist() == [0.5, 0.5, 0.5]


def test_look_ups_need_no_level() -> None:
    past = PastTrees()
    past.append(np.array([[0.5], [0.5]]), np.array([[-1], [-1]]), np.array([[0], [0]]), levels=0)
    assert past.nodes(Calibration()).weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("requests", [1, 48])
def test_old_trees_are_forgotten_with_their_levels(requests: int) -> None:
    past, column = PastTrees(), np.ones((requests, 1), dtype=int)
    for levels in (5, *[1] * TREES):
        past.append(0.5 * column, column, column, levels=levels)
    assert len(past) == TREES
    assert past.nodes(Calibration()).weight.tolist() == [1 / TREES] * TREES
