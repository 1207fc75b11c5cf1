"""Verification without a host sync: our kernel over the paged cache on a GPU, a dense mask on a CPU."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.attention import triton_tree
from vllm_adaptive_tree.attention.cpu import attend, context_bias, window_bias
from vllm_adaptive_tree.attention.plan import AttentionPlan
from vllm_adaptive_tree.attention.triton_tree import Scales
from vllm_adaptive_tree.engine.common.attention import AttentionVariant, TreeAttention, TreeMetadata
from vllm_adaptive_tree.trees.masks import ancestor_bits

LATENT_GROUP = 16
"""Query heads of a latent layer that a program of the kernel reads together: an accumulator of 512 values for each
would fill its registers."""


class LayerShape(NamedTuple):
    """Shape of a layer as the tree kernel sees it. All heads of a latent layer have one key, which the kernel is given
    as several KV heads in the same memory."""

    heads: int
    kv_heads: int
    size: int  # of a head's values

    @classmethod
    def of(cls, layer: Any) -> Self:
        """`layer`: vLLM's, of full or of latent attention."""
        impl = layer.impl
        if (rank := getattr(impl, "kv_lora_rank", None)) is not None:
            return cls(impl.num_heads, impl.num_heads // gcd(impl.num_heads, LATENT_GROUP), rank)
        return cls(impl.num_heads, impl.num_kv_heads, impl.head_size)


@dataclass(frozen=True, slots=True)
class KernelTrees(TreeMetadata):
    """Metadata for kernels: the first Q requests of the batch have trees, the backend attends for the others. The
    tensors are parts of persistent buffers, so a CUDA graph may read them."""

    native: Any
    """vLLM's, for the other requests, of latent layers an `Others`; None if all have trees, which may be empty."""
    block_table: Tensor  # [Q, B]
    row_start: Tensor  # [Q + 1] int32
    context: Tensor  # [Q] int32: tokens before each root
    ancestors: Tensor  # [rows or more, W] int64
    rows: int  # of the trees, and of padding
    plan: AttentionPlan | None  # of these rows; None: made by each layer

    reads_rows: ClassVar[bool] = False

    def rows_of(self, rows: int) -> int:
        return self.rows

    def before(self) -> Any:
        return self.native

    def attend(
        self, impl: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, out: Tensor
    ) -> Tensor:
        keys, values, scales = impl.views(layer, kv_cache)
        where = self.block_table, self.row_start, self.context, self.ancestors
        triton_tree.tree_attention(
            *(query[: self.rows], keys, values, *where, impl.scale, out[: self.rows]),
            plan=self.plan,
            scales=scales,
            **impl.variant,
        )
        return out


def packed_bits(parent: Tensor, row_start: Tensor, rows: int) -> Tensor:
    """`ancestor_bits` of trees `parent` [Q, N], row by row: [rows, W]; `row_start` [Q + 1]: the rows of each. Those
    after the last are padding, and get any bits."""
    row = torch.arange(rows, device=parent.device)
    request = torch.searchsorted(row_start[1:].long(), row, right=True).clamp(max=len(parent) - 1)
    return ancestor_bits(parent)[request, (row - row_start[request]).clamp(max=parent.shape[1])]


def without_first(native: Any, count: int) -> Any:
    """vLLM's metadata without the first `count` requests of the batch; the others keep their rows."""
    return replace(
        native,
        query_start_loc=native.query_start_loc[count:],
        seq_lens=native.seq_lens[count:],
        block_table=native.block_table[count:],
        scheduler_metadata=None,
    )


class PagedTreeAttention(TreeAttention):
    """Mixin before FlashAttention on a GPU."""

    head_size: int
    cache: Tensor | None = None
    """Cache of the last call."""

    @cached_property
    def variant(self) -> dict[str, Any]:
        return AttentionVariant.of(self)._asdict()

    def views(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor, Scales | None]:
        """As `split`, and the scales of a cache of 8 bits; those of one cache are made once."""
        if self.cache is not kv_cache:
            key, value = self.split(kv_cache)
            scales = Scales(layer._q_scale, layer._k_scale, layer._v_scale) if key.dtype.itemsize == 1 else None
            self.cache, self.cache_views = kv_cache, (key, value, scales)
        return self.cache_views

    def split(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """[blocks, Hkv, block_size, 2 * D] -> key, value [blocks, block_size, Hkv, D]. vLLM's cache of 8 bits is one of
        integers."""
        if kv_cache.dtype == torch.uint8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        key, value = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return key, value


@dataclass(frozen=True, slots=True)
class DenseTrees(TreeMetadata):
    """Metadata on a CPU: vLLM's kernel reads every row as part of a chain, then the rows of the trees are computed
    again over a gathered context, with a mask."""

    native: Any  # vLLM's, of all rows; of latent layers an `Others`, or None
    rows: Tensor  # [Q, T] int64: rows of the flat batch, each tree's root first; padded with the root's
    block_table: Tensor  # [Q, B]
    bias: Tensor  # [Q, T, B * block_size + T] float32
    position: Tensor  # [Q, T]: root + depth
    saved: dict[str, tuple[Tensor, Tensor]]  # layer -> key, value of all rows
    windowed: dict[int, Tensor]  # window -> the bias with it

    @classmethod
    def of(
        cls,
        native: Any,
        block_table: Tensor,
        first: Tensor,
        inside: Tensor,
        mask: Tensor,
        context: Tensor,
        *,
        block_size: int,
        longest: int,
    ) -> Self:
        """Metadata of Q requests.

        Args:
            first: [Q], first row of each in the flat batch.
            inside: [Q, T] bool, rows that there are, the first among them.
            mask: [Q, T, T] or [T, T] bool, rows of its request that each sees.
            context: [Q], tokens before the first row.
            longest: most tokens of a request in the cache.
        """
        rows = first[:, None] + torch.arange(inside.shape[1], device=first.device)
        rows, mask = torch.where(inside, rows, first[:, None]), mask.expand(len(first), -1, -1)
        mask = torch.where(inside[:, :, None], mask, mask[:, :1])  # padding is the first row once more
        blocks = -(-longest // block_size)
        before = context_bias(context, blocks * block_size).expand(-1, inside.shape[1], -1)
        bias = torch.cat([before, torch.where(mask, 0.0, -torch.inf)], 2)
        position = context[:, None] + mask.sum(2) - 1
        return cls(native, rows, block_table[:, :blocks], bias, position, {}, {})

    def before(self) -> Any:
        return self.native

    def seen_through(self, window: int) -> Tensor:
        """Bias of a layer with this window (0: none), [Q, T, B * block_size + T]."""
        if not window:
            return self.bias
        if window not in self.windowed:
            context = self.bias.shape[2] - self.position.shape[1]
            before = torch.arange(context, device=self.position.device).expand(len(self.position), -1)
            places = torch.cat([before, self.position], 1)
            self.windowed[window] = window_bias(self.bias, self.position, places, window)
        return self.windowed[window]

    def attend(
        self, impl: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, out: Tensor
    ) -> Tensor:
        self.saved[layer.layer_name] = key, value
        context = impl.gather(layer, kv_cache, self.block_table)
        keys, values = (
            torch.cat([old, new[self.rows].transpose(1, 2).float()], 2)
            for old, new in zip(context, (key, value), strict=True)
        )
        window, soft_cap, sinks = AttentionVariant.of(impl)
        bias = self.seen_through(window)
        result = attend(query[self.rows], keys, values, bias, impl.scale, soft_cap=soft_cap, sinks=sinks)
        out[self.rows] = result.to(out.dtype)  # padding writes the root's result again
        return out
