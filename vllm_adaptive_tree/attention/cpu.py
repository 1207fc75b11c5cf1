"""Tree attention on a CPU: PyTorch's masked attention in float32."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def context_bias(lengths: Tensor, width: int) -> Tensor:
    """[R] context lengths -> [R, 1, width] float32: 0 where a key exists, -inf after the end."""
    past_end = torch.arange(width, device=lengths.device) >= lengths[:, None]
    return torch.where(past_end, -torch.inf, 0.0)[:, None]


def window_bias(bias: Tensor, position: Tensor, key_position: Tensor, window: int) -> Tensor:
    """`bias` [R, T, L] in which a row sees only the last `window` positions, its own included.

    Args:
        position: [R, T] of each row: in a tree its root's plus its depth, not its place in the list.
        key_position: [R, L] or [1, L] of each key.
        window: at least 1.
    """
    return bias.masked_fill(key_position[:, None] <= position[:, :, None] - window, -torch.inf)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    scale: float,
    *,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(q k^T * scale) + bias) v in float32.

    Args:
        query: [R, T, H, D].
        key, value: [R, Hkv, L, D] float32; H is a multiple of Hkv (GQA).
        bias: [R, T, L] float32; every row has at least one finite entry.
        soft_cap: cap(x) is soft_cap * tanh(x / soft_cap) (Gemma 2, arXiv 2408.00118); 0: x.
        sinks: [H], a score of each head that takes its part of the sum and brings no value (StreamingLLM,
            arXiv 2309.17453, as in gpt-oss).

    Returns:
        [R, T, H, D] float32.
    """
    grouped = query.shape[2] != key.shape[1]
    queries = query.float().transpose(1, 2)
    if not soft_cap and sinks is None:
        result = scaled_dot_product_attention(queries, key, value, bias[:, None], scale=scale, enable_gqa=grouped)
        return result.transpose(1, 2)
    queries = queries.unflatten(1, (key.shape[1], -1))  # [R, Hkv, H / Hkv, T, D]
    scores = torch.einsum("rhgtd,rhld->rhgtl", queries, key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores + bias[:, None, None]
    if sinks is not None:
        sink = sinks.float().view(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("rhgtl,rhld->rthgd", weights, value).flatten(2, 3)
