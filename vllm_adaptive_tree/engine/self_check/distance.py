"""Allowed distance between two ways of computing the same logits."""

import torch
from torch import Tensor

TIMES = 3.0
"""Allowed distance, in distances between vLLM's own two ways."""
ROUNDINGS = {torch.float32: 64.0, torch.float8_e4m3fn: 1.0}
OTHER_ROUNDINGS = 4.0
"""Allowed distance in roundings of the largest logit: in 16 bits a sum is rounded once, in float32 its every term."""


ROWS_OF_EXPERTS = 0.9
"""Share of the rows of a model with experts that are compared: where two experts are nearly level, a rounding decides,
and the row is another."""


def distance(a: Tensor, b: Tensor, *, share: float = 1.0) -> float:
    """Largest difference in the closest rows, so much of them all, of [rows, V]; NaN counts as infinitely far."""
    rows = (a - b).abs().nan_to_num(torch.inf).amax(-1).sort().values
    return float(rows[max(int(share * len(rows)), 1) - 1])


def allowed_error(dtype: torch.dtype, *, noise: float, peak: float) -> float:
    """Largest allowed distance.

    Args:
        dtype: the coarsest that attention computes with.
        noise: distance of vLLM's own two ways.
        peak: the largest logit.
    """
    return max(TIMES * noise, ROUNDINGS.get(dtype, OTHER_ROUNDINGS) * torch.finfo(dtype).eps * peak)
