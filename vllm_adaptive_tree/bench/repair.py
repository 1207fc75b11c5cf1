"""vLLM's chains sample wrongly on CPUs (0.32, 0.33): temperatures, top-k and top-p of draft tokens are never written.

`expand_kernel_impl` fills an int64 copy of its output there and drops it, so the rejection sampler reads memory that
nobody set (vLLM issue 55005). A baseline that accepts next to nothing would flatter every other method, so it is
repaired.
"""

from typing import Any

import torch
from torch import Tensor


def repair_sampling() -> bool:
    """Whether vLLM's chains needed it, in this process; call it when the engine has started."""
    from vllm.v1.sample import rejection_sampler

    module: Any = rejection_sampler
    ends = torch.tensor([2, 3], dtype=torch.int32)
    for values in (torch.tensor([0.5, 0.0]), torch.tensor([7, 3], dtype=torch.int32)):
        right = expand(values, ends, 3, 0, 1)
        if not torch.equal(module.expand_batch_to_tokens(values, ends, 3, 0, 1), right):
            module.expand_batch_to_tokens = expand
            return True
    return False


def expand(values: Tensor, ends: Tensor, tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """`values` [R] repeated for each request's draft tokens, which end at `ends` [R]: [tokens]."""
    values = values.masked_fill(values == replace_from, replace_to)
    return values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=tokens)
