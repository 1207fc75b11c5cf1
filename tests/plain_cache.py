"""FlashAttention's cache and results on a CPU, by PyTorch's operations, for tests alone."""

from typing import Any

import torch
from torch import Tensor


class PlainAttention:
    """Replacement of vLLM's CPU kernel, whose cache is packed: [blocks, Hkv, block_size, 2 * D], key before value."""

    scale: float
    head_size: int
    sliding_window: int
    logits_soft_cap: float
    sinks: Tensor | None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:
            return output
        starts = attn_metadata.query_start_loc.tolist()
        for request, length in enumerate(attn_metadata.seq_lens.tolist()):
            own = slice(starts[request], starts[request + 1])
            rows = own.stop - own.start
            if rows == 0:
                continue
            blocks = attn_metadata.block_table[request, : -(-length // kv_cache.shape[2])].long()
            context = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length].float()  # [length, Hkv, 2 * D]
            keys, values = context.repeat_interleave(query.shape[1] // context.shape[1], 1).split(self.head_size, -1)
            scores = torch.einsum("qhd,khd->hqk", query[own].float(), keys) * self.scale
            if self.logits_soft_cap:
                scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
            last, place = torch.arange(length - rows, length)[:, None], torch.arange(length)
            hidden = place > last
            if self.sliding_window > 0:
                hidden |= place <= last - self.sliding_window
            scores.masked_fill_(hidden, -torch.inf)
            if self.sinks is not None:
                sinks = self.sinks.float()[:, None, None].expand(-1, rows, 1)
                scores = torch.cat([scores, sinks], -1)
            weights = scores.softmax(-1)[:, :, :length]
            output[own] = torch.einsum("hqk,khd->qhd", weights, values).to(output.dtype)
        return output

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        rows = (slots >= 0).nonzero()[:, 0]
        block, offset = slots[rows].long() // kv_cache.shape[2], slots[rows].long() % kv_cache.shape[2]
        kv_cache[block, :, offset] = torch.cat([key[rows], value[rows]], -1).to(kv_cache.dtype)
