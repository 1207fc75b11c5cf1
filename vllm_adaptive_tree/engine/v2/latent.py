"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with trees: every row absorbed, as vLLM decodes.

A row's queries are multiplied into the space of the latents, so that all heads read one key: a token's latent and its
RoPE part, side by side as in vLLM's cache. The value is the latent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm_adaptive_tree.attention.triton_tree import Scales
from vllm_adaptive_tree.engine.common.attention import TreeAttention, TreeMetadata
from vllm_adaptive_tree.engine.common.contexts import finite
from vllm_adaptive_tree.engine.v2.attention import LayerShape


@dataclass(frozen=True, slots=True)
class Absorbed:
    """What vLLM's latent layer reads of its metadata, for T rows that are all absorbed."""

    trees: TreeMetadata
    latent: Tensor  # [T, 1, L + P]
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None
    decode: bool = True


def forward(
    native: Callable[..., Tensor],
    q: Tensor,
    k_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    **more: Any,
) -> Tensor:
    """Take the place of a layer's `forward_impl`, which is `native`: rows of trees come first in the batch, and are
    absorbed; vLLM reads the others as it does."""
    if not isinstance(attn_metadata, TreeMetadata):
        return native(q, k_c_normed, k_pe, kv_cache, attn_metadata, output=output, **more)
    assert all(one is None for one in more.values()), "results are quantised apart from attention"
    others, end = attn_metadata.before(), attn_metadata.rows_of(len(q))
    if others is not None:
        rest = slice(others.first, None)
        native(q[rest], k_c_normed[rest], k_pe[rest], kv_cache, others.metadata, output=output[rest], **more)
        end = others.first
    latent = torch.cat([k_c_normed[:end, None], k_pe[:end]], -1) if attn_metadata.reads_rows else k_pe[:end]
    absorbed = Absorbed(attn_metadata, latent, end, end, end)
    native(q[:end], k_c_normed[:end], k_pe[:end], kv_cache, absorbed, output=output[:end], **more)
    return output


class FiniteLatents:
    """As `FiniteCache`, of latents."""

    def do_kv_cache_update(self, kv_c_normed: Tensor, k_pe: Tensor, *cache: Any) -> None:
        super().do_kv_cache_update(finite(kv_c_normed), finite(k_pe), *cache)  # type: ignore[misc]


class LatentAttention(TreeAttention):
    """Mixin before the class of a latent layer's implementation."""

    kv_lora_rank: int
    finite: ClassVar[type] = FiniteLatents

    @classmethod
    def adopt(cls, layer: Any, *, drafts: bool = False) -> None:
        super().adopt(layer, drafts=drafts)
        layer.forward_impl = partial(forward, layer.forward_impl)

    def forward_mqa(self, q: Any, kv_cache: Tensor, attn_metadata: Any, layer: Any) -> tuple[Tensor, Tensor | None]:
        """Attend with absorbed queries [T, H, L] and [T, H, P]; returns [T, H, L], and vLLM's log-sum-exp."""
        if not isinstance(attn_metadata, Absorbed):
            result: tuple[Tensor, Tensor | None] = super().forward_mqa(  # type: ignore[misc]
                q, kv_cache, attn_metadata, layer
            )
            return result
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        out = query.new_zeros(*query.shape[:2], self.kv_lora_rank)
        key = attn_metadata.latent
        attn_metadata.trees.attend(self, layer, query, key, key[..., : self.kv_lora_rank], kv_cache, out)
        return out, None

    def write(self, layer: Any, key: Tensor, value: Tensor, slots: Tensor) -> None:
        cache = layer.kv_cache.flatten(0, 1)
        cache[slots.clamp(min=0)] = key[:, 0].to(cache.dtype)  # slot 0 is in vLLM's null block

    def gather(self, layer: Any, kv_cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        blocks = kv_cache.index_select(0, block_table.flatten().long())
        key = blocks.view(len(block_table), 1, -1, kv_cache.shape[2]).float()
        return key, key[..., : self.kv_lora_rank]


class PagedLatentAttention(LatentAttention):
    """Mixin before the class of a latent layer's implementation on a GPU."""

    cache: Tensor | None = None
    """Cache of the last call."""
    variant: ClassVar[dict[str, Any]] = {}

    def views(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor, Scales | None]:
        """As `PagedTreeAttention.views`; `latent_views` of one cache are made once."""
        if self.cache is not kv_cache:
            self.cache, self.cache_views = kv_cache, (*latent_views(kv_cache, layer), None)
        return self.cache_views


def latent_views(kv_cache: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """Cache [blocks, block_size, L + P] of a latent layer as the tree kernel reads it: key and value
    [blocks, block_size, Hkv, ..], whose KV heads are the same memory."""
    shape = LayerShape.of(layer)
    key = kv_cache[:, :, None].expand(-1, -1, shape.kv_heads, -1)
    return key, key[..., : shape.size]
