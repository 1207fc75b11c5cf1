"""Tree attention inside vLLM's CPU backend: verification reads branches with the native kernel, or uses a mask."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from vllm_adaptive_tree.attention.cpu import attend, gather_context
from vllm_adaptive_tree.engine.common.attention import TreeAttention
from vllm_adaptive_tree.engine.common.scratch import ScratchBlocks


@dataclass(frozen=True, slots=True)
class Round:
    """Sequences that attend together: plain rows and first branches over the request's own blocks, other branches over
    scratch blocks, which are counted from 0 here."""

    rows: slice  # of `VerifyMetadata.rows`: those that attend
    written: slice  # of `VerifyMetadata.written`: those whose K/V it writes
    copies: list[tuple[int, int, int]]  # a block of the context, and the scratch blocks [start, end) that begin as it
    slots: Tensor  # [written] int64
    slot_step: Tensor  # [written] int64: added per block in front of the scratch blocks
    block_step: Tensor  # [sequences, B] int32: the same for the block table
    native: CPUAttentionMetadata


@dataclass(frozen=True, slots=True)
class VerifyMetadata:
    """A verification: every tree is cut into its branches, each a causal sequence for vLLM's native kernel.

    The first branch stands in the request's own slots. Another one has scratch blocks in the place of those that it
    does not share with the first, so one call of the kernel reads them all; commit needs its K/V again.
    """

    rounds: list[Round]  # mostly one; more where the branches of a batch outnumber the scratch blocks
    rows: Tensor  # [all] int64: rows of the flat batch, round after round
    written: Tensor  # [paths] int64: rows of the flat batch, a node once for every branch that leads through it
    saved: dict[str, tuple[Tensor, Tensor]]  # layer -> key, value [paths, Hkv, D]
    scratch: ScratchBlocks


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
        keys, values = key.index_select(0, step.written), value.index_select(0, step.written)
        step.saved[layer.layer_name] = keys, values
        queries = query.index_select(0, step.rows)
        results = torch.empty_like(queries)
        cache, first = step.scratch.seen_from(layer.layer_name, kv_cache)
        for turn in step.rounds:
            for source, start, end in turn.copies:
                cache[first + start : first + end] = cache[source]
            slots = torch.add(turn.slots, turn.slot_step, alpha=first)
            layer.impl.do_kv_cache_update(layer, keys[turn.written], values[turn.written], cache, slots)
            native = replace(turn.native, block_table=torch.add(turn.native.block_table, turn.block_step, alpha=first))
            super().forward(layer, queries[turn.rows], key, value, cache, native, results[turn.rows])
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
