"""What the metrics show of a step; it comes two steps later, and phases have no times: nobody waits for the device."""

from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.common.metrics import step_figures
from vllm_adaptive_tree.engine.v2.returning import Returning
from vllm_adaptive_tree.trees import TreeBatch


class Figures:
    def __init__(self) -> None:
        self.returning = Returning()
        self.depths: list[int] = []  # of verified nodes
        self.dead = 0  # rows of the draft

    def verified(self, tree: TreeBatch) -> None:
        self.returning.send(torch.where(tree.valid, tree.depth, 0), self._count)

    def drafted(self, dead: Tensor) -> None:
        """`dead` []: rows of the draft of this step."""
        self.returning.send(dead, self._lose)

    def take(self, expected: float, observed: float) -> Any:
        """For `ModelRunnerOutput`, at the end of every step; arguments as in `step_figures`."""
        self.returning.next_step()
        depths, self.depths, dead, self.dead = self.depths, [], self.dead, 0
        return step_figures({}, depths, expected, observed, dead=dead)

    def _count(self, depth: Tensor) -> None:
        self.depths += depth[depth > 0].tolist()

    def _lose(self, dead: Tensor) -> None:
        self.dead += int(dead)
