"""M-RoPE on Model Runner V2: positions of several parts."""

from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.mm.rope import RopeState


class TreeRopeState(RopeState):
    """vLLM's positions, which follow a chain, moved to the depths of a tree's nodes."""

    moved: Tensor | None = None
    """[rows]: how far the rows of the next step move."""

    @classmethod
    def of(cls, model_state: Any) -> "TreeRopeState | None":
        """Adopt the state of a target; None: it has one position a token."""
        state: TreeRopeState | None = getattr(model_state, "rope_state", None)
        if state is not None:
            state.__class__ = cls
        return state

    def prepare_positions(self, *args: Any) -> None:
        super().prepare_positions(*args)
        moved, self.moved = self.moved, None
        if moved is not None:
            self.positions[:, : len(moved)] += moved
