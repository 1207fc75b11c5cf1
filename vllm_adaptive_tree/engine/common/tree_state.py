"""State of a draft with attention layers, carried from one level of its trees to the next."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TreeState(NamedTuple):
    """State of R trees; S slots as in `Frontier`."""

    keys: Any  # the metadata of its levels: `open_level` comes before each
    root: Tensor  # [R]: positions of the roots' rows in the draft
    depth: Tensor  # [R, S]
    feedback: Tensor | None  # [R, S, H]: what a node passes to its children, if the draft has such

    @classmethod
    def begin(cls, keys: Any, root: Tensor, feedback: Tensor | None) -> "TreeState":
        """`root` [R], `feedback` [R, 1, H] of the roots."""
        return cls(keys, root, torch.zeros_like(root)[:, None], feedback)

    def below(self, parent: Tensor) -> tuple[Tensor, Tensor | None]:
        """Depth [R, W] of nodes below `parent` [R, W], and the feedback that they are given [R, W, H]."""
        given = self.feedback
        if given is not None:
            given = given.gather(1, parent[:, :, None].expand(-1, -1, given.shape[2]))
        return self.depth.gather(1, parent) + 1, given

    def extended(self, depth: Tensor, feedback: Tensor | None) -> "TreeState":
        """State after one more level, `depth` [R, W] and `feedback` [R, W, H]."""
        if self.feedback is not None and feedback is not None:
            feedback = torch.cat([self.feedback, feedback], 1)
        return self._replace(depth=torch.cat([self.depth, depth], 1), feedback=feedback)
