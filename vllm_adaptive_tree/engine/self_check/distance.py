"""How far two ways of computing the same logits may be apart."""

import torch
from torch import Tensor

TIMES = 3.0
"""So many times as far as vLLM's own two ways are."""
ROUNDINGS = {torch.float32: 64.0}
OTHER_ROUNDINGS = 4.0
"""Or so many roundings of the largest: in 16 bits a sum is rounded once, in float32 its every term."""


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference; NaN counts as infinitely far."""
    return float((one - other).abs().nan_to_num(torch.inf).max())


def allowed_error(dtype: torch.dtype, *, noise: float, peak: float) -> float:
    """`noise`: of vLLM's own; `peak`: the largest logit."""
    return max(TIMES * noise, ROUNDINGS.get(dtype, OTHER_ROUNDINGS) * torch.finfo(dtype).eps * peak)
