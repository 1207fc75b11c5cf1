"""Repair of vLLM issue 55005: on CPUs (0.32, 0.33) chains sample wrongly.

There `expand_kernel_impl` fills an int64 copy of its output and drops it, so the rejection sampler reads temperatures,
top-k and top-p of draft tokens from uninitialised memory. A baseline that accepts almost nothing would favour every
other method.
"""

from typing import Any

import torch
from torch import Tensor


def repair_sampling() -> bool:
    """Repair this process if needed, after the engine has started; returns whether it was."""
    from vllm.v1.sample import rejection_sampler

    module: Any = rejection_sampler
    ends = torch.tensor([2, 3], dtype=torch.int32)
    for values in (torch.tensor([0.5, 0.0]), torch.tensor([7, 3], dtype=torch.int32)):
        expected = expand(values, ends, 3, 0, 1)
        if not torch.equal(module.expand_batch_to_tokens(values, ends, 3, 0, 1), expected):
            module.expand_batch_to_tokens = expand
            return True
    return False


def expand(values: Tensor, ends: Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """Repeat `values` [R] for their requests' draft tokens, which end at `ends` [R]. Returns [tokens]."""
    values = values.masked_fill(values == replace_from, replace_to)
    return values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=tokens)
