"""Reference tree attention over a paged cache, in plain PyTorch: it defines the kernels' contract and tests them.

Reads lengths on the host and works request by request, in the dtype of its inputs.
"""

import torch
from torch import Tensor

from vllm_adaptive_tree.trees.masks import WORD


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    row_start: Tensor,
    context: Tensor,
    ancestors: Tensor,
    scale: float,
    out: Tensor,
    *,
    own: tuple[Tensor, Tensor, int] | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Row i of request r attends to all context[r] tokens and to its ancestors among the rows of its request.

    Its position is context[r] plus the number of its ancestors, so two rows of one depth have the same.

    Args:
        query: [rows, H, D], the rows of all requests, concatenated.
        key_cache, value_cache: [blocks, block_size, Hkv, D], stride 1 in the last dimension, else any; H is a multiple
            of Hkv. The rows' own K/V follow the context, at positions context[r] + i. Values may be shorter than keys
            and queries; `out` is then as they are.
        block_table: [R, B] int32, the block of positions b * block_size onwards.
        row_start: [R + 1] int32, first row of each request; requests may have any number of rows, including none.
        context: [R] int32, tokens of each request before its first row.
        ancestors: [rows, W] int64, bit j of word w: row 64 * w + j of the same request is an ancestor of this row, or
            the row itself (`trees.masks.ancestor_bits`). Ancestors come before their descendants.
        scale: of the attention scores.
        out: [rows, H, D]; rows after row_start[R] are left unchanged.
        own: K/V of nodes [R, S, Hkv, D] and an offset. Then nothing follows the contexts in the cache: row i of a
            request has slot offset + i there, and the bits count slots.
        window: if not 0, a row sees the last so many positions on its path, its own included. With `own` it must be
            longer than a tree is deep.
        soft_cap: if not 0, scores are soft_cap * tanh(score / soft_cap).
        sinks: [H], a score of each head that takes its part of the softmax and brings no value.

    Returns:
        out.
    """
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    starts, lengths = row_start.tolist(), context.tolist()
    for request, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        count = end - start
        slots = count if own is None else own[2] + count
        position = torch.arange(length + (slots if own is None else 0), device=query.device)
        block = block_table[request].long()[position // key_cache.shape[1]]
        slot = position % key_cache.shape[1]
        key, value = key_cache[block, slot], value_cache[block, slot]
        if own is not None:
            key, value = torch.cat([key, own[0][request, :slots]]), torch.cat([value, own[1][request, :slots]])
        key, value = (
            part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value)
        )  # [length + slots, H, D]
        row = torch.arange(slots, device=query.device)
        tree = (ancestors[start:end, row // WORD] >> row % WORD & 1).bool()  # [count, slots]
        seen = torch.cat((tree.new_ones(count, length), tree), dim=1)
        if window:
            place = length + tree.sum(1) - 1  # [count]
            of_key = torch.cat([torch.arange(length, device=place.device), place if own is None else row + length])
            seen &= (of_key > place[:, None] - window) | (of_key >= length) & (own is not None)
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(-1, count, 1)], -1)
        weights = scores.softmax(-1)[:, :, : length + slots]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, value)
    return out
