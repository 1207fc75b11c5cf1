"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with trees: every row absorbed, as vLLM decodes.

A row's queries are multiplied into the space of the latents, so that all heads read one key: a token's latent and its
RoPE part, side by side as in vLLM's cache. The value is the latent.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.attention.cpu import context_bias
from vllm_adaptive_tree.attention.plan import AttentionPlan
from vllm_adaptive_tree.attention.triton_tree import Scales
from vllm_adaptive_tree.engine.common.attention import TreeAttention, TreeMetadata
from vllm_adaptive_tree.engine.common.contexts import finite
from vllm_adaptive_tree.engine.targets.checks import is_latent
from vllm_adaptive_tree.engine.v2.attention import DenseTrees, KernelTrees, LayerShape
from vllm_adaptive_tree.trees.masks import WORD


class Others(NamedTuple):
    """The requests of a batch that have no trees: they come after those that have."""

    metadata: Any  # vLLM's
    first: int  # row of the flat batch


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
        prepare(attn_metadata)
        return native(q, k_c_normed, k_pe, kv_cache, attn_metadata, output=output, **more)
    others, end = attn_metadata.before(), attn_metadata.rows_of(len(q))
    if others is not None:
        rest = slice(others.first, None)
        prepare(others.metadata)
        native(q[rest], k_c_normed[rest], k_pe[rest], kv_cache, others.metadata, output=output[rest], **more)
        end = others.first
    latent = torch.cat([k_c_normed[:end, None], k_pe[:end]], -1) if attn_metadata.reads_rows else k_pe[:end]
    absorbed = Absorbed(attn_metadata, latent, end, end, end)
    native(q[:end], k_c_normed[:end], k_pe[:end], kv_cache, absorbed, output=output[:end], **more)
    return output


def prepare(metadata: Any) -> None:
    """Tell vLLM's backend of prompts that `metadata` come next, if others were built since: it keeps the last."""
    prefill = getattr(metadata, "prefill", None)
    if prefill is not None and getattr(prefill.prefill_backend, "prepared", prefill) is not prefill:
        prefill.prefill_backend.prepare_metadata(prefill)
        prefill.prefill_backend.prepared = prefill


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


def chain_bits(row_start: Tensor, rows: int, most: int) -> Tensor:
    """`ancestor_bits` [rows, W] of requests whose rows are chains; `row_start` [R + 1]: the rows of each, at most so
    many. Rows after the last are padding, and get any bits."""
    row = torch.arange(rows, device=row_start.device)
    request = torch.searchsorted(row_start[1:].long(), row, right=True).clamp(max=len(row_start) - 2)
    place = row - row_start[request]
    seen = 1 + place[:, None] - WORD * torch.arange(-(-most // WORD), device=row.device)
    return torch.where(seen < WORD, (1 << seen.clamp(0, WORD - 1)) - 1, -1)


class Chains(NamedTuple):
    """Rows of R requests that a draft of latents reads. vLLM's latent backends part a batch by lengths on the host, and
    those of accepted tokens are known to the device alone."""

    row_start: Tensor  # [R + 1] int32
    context: Tensor  # [R] int32: tokens of each before its rows
    block_table: Tensor  # [R, B]
    rows: int  # of the requests, at most, and of padding
    most: int  # rows of a request
    longest: int  # tokens of a request, at most

    def metadata(self, others: Others | None, block_size: int, plan: AttentionPlan | None) -> TreeMetadata:
        """`others`: after these rows; `plan`: of kernels, with which this package reads; None: without any."""
        if plan is None:
            return self._dense(others, block_size)
        where = self.block_table, self.row_start, self.context
        bits = chain_bits(self.row_start, self.rows, self.most)
        return KernelTrees(others, *where, bits, self.rows, plan.update(self.row_start, self.context))

    def _dense(self, others: Others | None, block_size: int) -> DenseTrees:
        count = self.row_start.diff()
        requests = count.nonzero()[:, 0]
        place, first = torch.arange(self.most, device=count.device), self.row_start[requests, None].long()
        inside = place < count[requests, None]
        mask = torch.where(inside[:, :, None], place[:, None] >= place, place == 0)  # padding is the first row again
        blocks = -(-self.longest // block_size)
        context = self.context[requests]
        before = context_bias(context, blocks * block_size).expand(-1, self.most, -1)
        bias = torch.cat([before, torch.where(mask, 0.0, -torch.inf)], 2)
        rows, table = torch.where(inside, first + place, first), self.block_table[requests, :blocks]
        return DenseTrees(others, rows, table, bias, context[:, None] + mask.sum(2) - 1, {}, {})


class LatentBuilder:
    """vLLM's builder of the metadata of latent layers, watched: it parts a batch by lengths on the host, and those of
    trees are known to the device alone."""

    def __init__(self, builder: Any):
        self.native: Callable[..., Any] = builder.build
        self.given: Any = None
        builder.build = self.build

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **more: Any) -> Any:
        self.given, self.more = common_attn_metadata, more
        return self._built(common_prefix_len, common_attn_metadata, **more)

    def _built(self, *given: Any, **more: Any) -> Any:
        metadata = self.native(*given, **more)
        if (prefill := metadata.prefill) is not None:
            prefill.prefill_backend.prepared = prefill
        return metadata

    @property
    def block_table(self) -> Tensor:
        """[R, B], of the last batch."""
        table: Tensor = self.given.block_table_tensor
        return table

    def others(self, count: int, rows: int) -> Others | None:
        """Metadata of the last batch without its first `count` requests, which have so many `rows`; None: nobody is
        left."""
        given = self.given
        if count == given.num_reqs:
            return None
        starts = given.query_start_loc_cpu[count:] - given.query_start_loc_cpu[count]
        of_requests = {
            name: value[count:]
            for name in ("seq_lens", "seq_lens_cpu_upper_bound", "block_table_tensor", "is_prefilling")
            if (value := getattr(given, name, None)) is not None
        }
        rest = replace(
            given,
            query_start_loc=given.query_start_loc[count:] - rows,
            query_start_loc_cpu=starts,
            num_reqs=given.num_reqs - count,
            num_actual_tokens=given.num_actual_tokens - rows,
            max_query_len=int(np.diff(starts).max()),
            slot_mapping=given.slot_mapping[rows:],
            _token_to_req_indices_cache=None,
            **of_requests,
        )
        return Others(self._built(0, rest, **self.more), rows)


def latent_builders(groups: Iterable[Iterable[Any]], layers: Mapping[str, Any]) -> dict[str, LatentBuilder]:
    """Builders of the latent ones among `layers`, by name. `groups`: vLLM's attention groups of each cache group."""
    found = dict[str, LatentBuilder]()
    for group in chain.from_iterable(groups):
        names = [name for name in group.layer_names if name in layers and is_latent(layers[name])]
        if names:
            found |= dict.fromkeys(names, LatentBuilder(group.get_metadata_builder()))
    return found
