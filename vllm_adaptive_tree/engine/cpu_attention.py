"""Tree attention inside vLLM's CPU backend: verification walks paths with the native kernel, or uses a mask."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from vllm_adaptive_tree.attention.cpu import attend, gather_context
from vllm_adaptive_tree.engine.attention import TreeAttention


@dataclass(frozen=True, slots=True)
class Round:
    """At most one branch of every tree; the first round also holds every row that belongs to no branching tree."""

    rows: slice  # of `VerifyMetadata.rows`: those that attend
    nodes: slice  # of `VerifyMetadata.nodes`: the nodes among them
    slots: Tensor  # [nodes] int64: where their K/V goes first, the slot of the node's position
    native: CPUAttentionMetadata


@dataclass(frozen=True, slots=True)
class VerifyMetadata:
    """A verification: every tree is walked depth first, each path a causal sequence in the request's own slots.

    A branch overwrites the tail of the one before it, so the native kernel sees a chain each time and returns the bits
    of plain decoding. Commit needs the overwritten K/V again.
    """

    rounds: list[Round]
    rows: Tensor  # [all] int64: rows of the flat batch, round after round
    nodes: Tensor  # [nodes of all trees] int64: rows of the flat batch, in the order of the walk
    saved: dict[str, tuple[Tensor, Tensor]]  # layer -> key, value [nodes, Hkv, D]


@dataclass(frozen=True, slots=True)
class DenseTrees:
    """A verification without a look at the host: vLLM's kernel reads every row as part of a chain, then the rows of the
    trees are computed again over a gathered context, with a mask."""

    native: CPUAttentionMetadata
    rows: Tensor  # [Q, T] int64: rows of the flat batch, each tree's root first; padded with the root's
    block_table: Tensor  # [Q, B]
    bias: Tensor  # [Q, T, B * block_size + T] float32
    saved: dict[str, tuple[Tensor, Tensor]]  # layer -> key, value of all rows


class CPUTrees(TreeAttention):
    """Before vLLM's CPU attention."""

    def _verify(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, step: VerifyMetadata, out: Tensor
    ) -> Tensor:
        keys, values = key.index_select(0, step.nodes), value.index_select(0, step.nodes)
        step.saved[layer.layer_name] = keys, values
        queries = query.index_select(0, step.rows)
        results = torch.empty_like(queries)
        for turn in step.rounds:
            layer.impl.do_kv_cache_update(layer, keys[turn.nodes], values[turn.nodes], kv_cache, turn.slots)
            super().forward(layer, queries[turn.rows], key, value, kv_cache, turn.native, results[turn.rows])
        return out.index_copy_(0, step.rows, results)

    def _dense(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, step: DenseTrees, out: Tensor
    ) -> Tensor:
        step.saved[layer.layer_name] = key, value
        super().forward(layer, query, key, value, kv_cache, step.native, out)
        context = self.gather(layer, kv_cache, step.block_table)
        keys, values = (
            torch.cat([old, new[step.rows].transpose(1, 2).float()], 2)
            for old, new in zip(context, (key, value), strict=True)
        )
        result = attend(query[step.rows], keys, values, step.bias, self.scale)
        out[step.rows] = result.to(out.dtype)  # padding writes its root's result again
        return out

    def gather(self, layer: Any, kv_cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """As `gather_context`."""
        return gather_context(kv_cache, block_table, layer.isa)

    ways: ClassVar[Mapping[type, Callable[..., Tensor]]] = {
        **TreeAttention.ways,
        VerifyMetadata: _verify,
        DenseTrees: _dense,
    }


def native_metadata(builder: Any, lengths: list[int], seq_lens: list[int], block_table: Tensor, slots: Tensor) -> Any:
    """vLLM's own metadata for some requests, their rows packed.

    Args:
        builder: vLLM's metadata builder of the layers' group.
        lengths, seq_lens: rows of each request, and its tokens in the cache with them.
        block_table: [R, blocks].
        slots: [rows] int64.
    """
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=len(slots),
        max_query_len=max(lengths),
        max_seq_len=max(seq_lens),
        block_table_tensor=block_table,
        slot_mapping=slots,
        causal=True,
    )
    return builder.build(0, common)
