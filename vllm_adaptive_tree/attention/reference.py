"""What tree attention over a paged cache is, in plain PyTorch: the contract of the kernels and what they are tested by.

It reads lengths on the host and works request by request, in the dtype of its inputs.
"""

import torch
from torch import Tensor

from vllm_adaptive_tree.trees.ancestor_bits import WORD


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
) -> Tensor:
    """Row i of request r attends to all context[r] tokens and to its ancestors among the rows of its request.

    Args:
        query: [rows, H, D], the rows of all requests one behind another.
        key_cache, value_cache: [blocks, block_size, Hkv, D], any strides but 1 in the last dimension; H is a multiple
            of Hkv. The rows' own K/V stand behind the context, in positions context[r] + i.
        block_table: [R, B] int32, block of positions b * block_size and following.
        row_start: [R + 1] int32, first row of each request; requests may have any number of rows, none included.
        context: [R] int32, tokens of each request before its first row.
        ancestors: [rows, W] int64, bit j of word w: row 64 * w + j of the same request is an ancestor of this row, or
            the row itself (`trees.ancestor_bits`). Ancestors stand before their descendants.
        scale: of the scores.
        out: [rows, H, D]; rows behind row_start[R] are left as they are.

    Returns:
        out.
    """
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    starts, lengths = row_start.tolist(), context.tolist()
    for request, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        count = end - start
        position = torch.arange(length + count, device=query.device)
        block = block_table[request].long()[position // key_cache.shape[1]]
        slot = position % key_cache.shape[1]
        key, value = (
            cache[block, slot].repeat_interleave(heads // kv_heads, dim=1) for cache in (key_cache, value_cache)
        )  # [length + count, H, D]
        row = position[:count]
        own = (ancestors[start:end, row // WORD] >> row % WORD & 1).bool()  # [count, count]
        seen = torch.cat((own.new_ones(count, length), own), dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key) * scale
        law = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", law, value)
    return out
