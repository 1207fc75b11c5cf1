"""The dense tree mask."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def ancestor_mask(parent: Tensor) -> Tensor:
    """Ancestor-or-self mask of R trees, the root first: [R, 1 + N, 1 + N] bool.

    An empty slot sees the root and itself.

    Args:
        parent: [R, N] int64, every parent before its children; -1: the root.
    """
    nodes = parent.shape[1]
    seen = torch.eye(1 + nodes, dtype=torch.bool, device=parent.device).expand(len(parent), -1, -1)
    up = pad(parent + 1, (1, 0))  # the ancestor 1, 2, 4, ... levels up; the root is its own parent
    for _ in range(nodes.bit_length()):
        seen = seen | seen.gather(1, up[:, :, None].expand_as(seen))
        up = up.gather(1, up)
    return seen
