"""What the metrics show of a step; it comes two steps later, and phases have no times: nobody waits for the device."""

from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.metrics import step_figures
from vllm_adaptive_tree.engine.v2.returning import Returning
from vllm_adaptive_tree.trees import TreeBatch


class Figures:
    def __init__(self) -> None:
        self.returning = Returning()
        self.depths: list[int] = []  # of verified nodes

    def verified(self, tree: TreeBatch) -> None:
        self.returning.send(torch.where(tree.valid, tree.depth, 0), self._count)

    def take(self, expected: float, observed: float) -> Any:
        """For `ModelRunnerOutput`, at the end of every step; arguments as in `step_figures`."""
        self.returning.next_step()
        depths, self.depths = self.depths, []
        return step_figures({}, depths, expected, observed)

    def _count(self, depth: Tensor) -> None:
        self.depths += depth[depth > 0].tolist()
