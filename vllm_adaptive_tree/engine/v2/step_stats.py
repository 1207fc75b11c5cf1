"""The metrics of a step, which arrive two steps later; no seconds per phase, since nothing waits for the device."""

from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.common.metrics import step_stats
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
from vllm_adaptive_tree.trees import TreeBatch


class StepStats:
    def __init__(self) -> None:
        self.readback = AsyncReadback()
        self.depths: list[int] = []  # of verified nodes
        self.dead = 0  # rows of the draft

    def verified(self, tree: TreeBatch) -> None:
        self.readback.send(torch.where(tree.valid, tree.depth, 0), self._add_depths)

    def drafted(self, dead: Tensor) -> None:
        """`dead` []: the number of draft rows of this step without a distribution."""
        self.readback.send(dead, self._add_dead)

    def take(self, expected: float, observed: float) -> Any:
        """For `ModelRunnerOutput`, at the end of every step; arguments as in `step_stats`."""
        self.readback.next_step()
        depths, self.depths, dead, self.dead = self.depths, [], self.dead, 0
        return step_stats({}, depths, expected, observed, dead=dead)

    def _add_depths(self, depth: Tensor) -> None:
        self.depths += depth[depth > 0].tolist()

    def _add_dead(self, dead: Tensor) -> None:
        self.dead += int(dead)
