"""Tree attention on a CPU: PyTorch's masked attention in float32."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def context_bias(lengths: Tensor, width: int) -> Tensor:
    """[R] context lengths -> [R, 1, width] float32: 0 where a key exists, -inf after the end."""
    past_end = torch.arange(width, device=lengths.device) >= lengths[:, None]
    return torch.where(past_end, -torch.inf, 0.0)[:, None]


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale + bias) v in float32.

    Args:
        query: [R, T, H, D].
        key, value: [R, Hkv, L, D] float32; H is a multiple of Hkv (GQA).
        bias: [R, T, L] float32; every row has at least one finite entry.

    Returns:
        [R, T, H, D] float32.
    """
    grouped = query.shape[2] != key.shape[1]
    result = scaled_dot_product_attention(
        query.float().transpose(1, 2), key, value, bias[:, None], scale=scale, enable_gqa=grouped
    )
    return result.transpose(1, 2)
