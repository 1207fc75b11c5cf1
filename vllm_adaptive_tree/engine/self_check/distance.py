"""Allowed distance between two ways of computing the same logits."""

import torch
from torch import Tensor

TIMES = 3.0
"""Allowed distance, in distances between vLLM's own two ways."""
ROUNDINGS = {torch.float32: 64.0}
OTHER_ROUNDINGS = 4.0
"""Allowed distance in roundings of the largest logit: in 16 bits a sum is rounded once, in float32 its every term."""


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference; NaN counts as infinitely far."""
    return float((a - b).abs().nan_to_num(torch.inf).max())


def allowed_error(dtype: torch.dtype, *, noise: float, peak: float) -> float:
    """Largest allowed distance. `noise`: that of vLLM's own two ways; `peak`: the largest logit."""
    return max(TIMES * noise, ROUNDINGS.get(dtype, OTHER_ROUNDINGS) * torch.finfo(dtype).eps * peak)
