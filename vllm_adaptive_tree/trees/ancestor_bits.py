"""The tree mask packed into bits for attention kernels: 1/8 byte per entry, and a zero word skips a whole tile."""

import torch
from torch import Tensor
from torch.nn.functional import pad

WORD = 64


def ancestor_bits(parent: Tensor) -> Tensor:
    """Ancestor-or-self mask of R trees as bits: [R, 1 + N, W] int64, W = ceil((1 + N) / 64).

    Row 0 is the root, row 1 + i node i. Bit j of word w of a row: row 64 * w + j is its ancestor or itself. An empty
    slot sees the root and itself.

    Args:
        parent: [R, N] int64, every parent before its children; -1: the root.
    """
    requests, nodes = parent.shape
    row = torch.arange(1 + nodes, device=parent.device)
    word = torch.arange(-(-(1 + nodes) // WORD), device=parent.device)
    itself = torch.ones_like(row) << row % WORD  # bit 63 is the sign
    bits = torch.where(row[:, None] // WORD == word, itself[:, None], 0)  # [1 + N, W]
    bits = (bits | bits[:1]).repeat(requests, 1, 1)  # every row sees the root
    up = pad(parent + 1, (1, 0))  # [R, 1 + N]: the ancestor 1, 2, 4, ... levels up; the root is its own parent
    for _ in range((nodes - 1).bit_length() if nodes else 0):
        bits = bits | bits.gather(1, up[:, :, None].expand_as(bits))
        up = up.gather(1, up)
    return bits
