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


def test_deep_trees_of_easy_text_do_not_speak_for_hard_text() -> None:
    """A node is never expected more often than its parent."""
    past, easy = PastTrees(), np.array([[0.9, 0.8, 0.7, 0.6]])
    depth = np.arange(1, 5)[None]
    past.append(easy, depth, depth, levels=4)
    for _ in range(9):
        past.append(np.array([[0.2]]), depth[:, :1], depth[:, :1], levels=1)
    nodes = past.nodes(Calibration())
    expected = [float((nodes.weight * nodes.chance)[nodes.level == level].sum()) for level in range(1, 5)]
    assert expected == sorted(expected, reverse=True)
    steps = [expected[at] / expected[at - 1] for at in range(1, 4)]
    chances = nodes.chance[:4]
    assert steps == pytest.approx((chances[1:] / chances[:-1]).tolist())


def test_trees_of_one_depth_weigh_the_same() -> None:
    past, rng = PastTrees(), np.random.default_rng(0)
    for _ in range(5):
        past.append(np.sort(rng.random((2, 4)))[:, ::-1], *[np.array([[1, 2, 2, 3]] * 2)] * 2, levels=3)
    assert past.nodes(Calibration()).weight.tolist() == [0.1] * 40


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
