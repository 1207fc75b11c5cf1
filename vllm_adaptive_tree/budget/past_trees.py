"""Trees of past steps: what a batch's next trees are expected to be."""

from collections import deque
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_adaptive_tree.budget.acceptance_model import Calibration

Step = tuple[NDArray[Any], NDArray[Any], NDArray[Any], int]
"""[R, N] value, depth and level of the trees of a step, and how many levels it drafted; empty slots have value 0."""
TREES = 64
"""Number of trees that are remembered."""


class Nodes(NamedTuple):
    """Nodes [M] of past trees, tree after tree."""

    value: NDArray[np.float64]
    level: NDArray[np.int64]
    """Draft levels that a node needs; 0: from a look-up."""
    chance: NDArray[np.float64]
    falling: NDArray[np.float64]
    """Chance, at most that of the node before it in its tree."""
    weight: NDArray[np.float64]
    """Number of such nodes in a tree, expected."""


class PastTrees:
    """The last trees, as their steps had them."""

    def __init__(self) -> None:
        self._steps = deque[Step]()
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, TREES)

    def append(self, value: NDArray[Any], depth: NDArray[Any], level: NDArray[Any], *, levels: int) -> None:
        """`levels`: drafted for these trees."""
        self._steps.append((value, depth, level, levels))
        self._count += len(value)
        while self._count - len(self._steps[0][0]) >= TREES:
            self._count -= len(self._steps.popleft()[0])
        self.__dict__.pop("_columns", None)

    def clear(self) -> None:
        self._steps.clear()
        self._count = 0
        self.__dict__.pop("_columns", None)

    @cached_property
    def _columns(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Value, depth and level [T, N], and the levels of each tree [T, 1]."""
        widths = {step[0].shape[1] for step in self._steps}
        steps = self._steps if len(widths) == 1 else [_padded(step, max(widths)) for step in self._steps]
        *parts, levels = zip(*steps, strict=True)
        value, depth, level = (np.concatenate(part)[-TREES:] for part in parts)
        drafted = np.repeat(levels, [len(step[0]) for step in steps])[-TREES:, None]
        return value.astype(np.float64), depth.astype(np.int64), level.astype(np.int64), drafted

    def nodes(self, calibration: Calibration) -> Nodes:
        value, depth, level, drafted = self._columns
        there, chance = value > 0, calibration.chances(value, depth)
        falling = np.minimum.accumulate(np.where(there, chance, np.inf), axis=1)
        own = np.broadcast_to(drafted, level.shape)[there]
        weight = _weights(chance[there], level[there], own) / len(value)
        return Nodes(value[there], level[there], chance[there], falling[there], weight)


def _weights(chance: NDArray[Any], level: NDArray[Any], drafted: NDArray[Any]) -> NDArray[np.float64]:
    """How many nodes each of these [M] stands for. A tree of few levels says nothing about deeper ones, and trees are
    drafted deep where the text is easy: of those that end before a level, the others that are as likely until there
    tell, as in Kaplan and Meier's estimate.

    Args:
        drafted: levels that were drafted of the node's tree.
    """
    most = int(level.max(initial=0))
    by_level = np.zeros((1 + most, 1 + most))
    np.add.at(by_level, (level, np.minimum(drafted, most)), chance)
    at_least = by_level[:, ::-1].cumsum(1)[:, ::-1]  # [level, levels of the tree or more]
    weight = np.ones(1 + most)
    for deep in range(2, 1 + most):
        ended, known = at_least[deep - 1, deep - 1 :][:2]
        weight[deep] = weight[deep - 1] * ended / known if known else 0.0
    return weight[level]


def _padded(step: Step, width: int) -> Step:
    """Trees with empty slots up to `width`."""
    if step[0].shape[1] == width:
        return step
    *parts, levels = step
    value, depth, level = (np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts)
    return value, depth, level, levels
