"""Verification by vLLM's CPU attention: every branch of a tree is a causal sequence for its native kernel."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from vllm_adaptive_tree.engine.common.attention import TreeMetadata
from vllm_adaptive_tree.engine.v1.scratch import ScratchBlocks


@dataclass(frozen=True, slots=True)
class AttentionRound:
    """Sequences that attend together: plain rows and first branches over the request's own blocks, other branches over
    scratch blocks. These are behind a layer's own blocks, so its tables and slots are its own."""

    rows: slice  # of the flat batch, which attend
    written: Tensor  # [paths] int64: rows with K/V to write, a node once for every branch through it
    copies: list[tuple[int, int, int]]
    """A block of the context, and the scratch blocks [start, end), counted from 0, that begin as it."""
    slots: dict[str, Tensor]  # layer -> [paths] int64
    tables: dict[str, Tensor]  # layer -> [sequences, B] int32: block table
    native: CPUAttentionMetadata  # with the block table of the layer that attends


@dataclass(frozen=True, slots=True)
class VerifyMetadata(TreeMetadata):
    """Metadata of trees cut into branches, each a causal sequence for vLLM's native kernel.

    The rows of a tree come depth first, so each branch is consecutive rows, and the first one is in the request's own
    slots as vLLM has written them. The others have scratch blocks in place of those that they do not share with the
    first, so one call of the kernel reads them all; commit needs their K/V again.
    """

    rounds: list[AttentionRound]  # mostly one; more if the branches of a batch outnumber the scratch blocks
    saved: dict[str, list[tuple[Tensor, Tensor]]]  # layer -> key, value [paths, Hkv, D] of each round
    scratch: ScratchBlocks

    def attend(
        self, impl: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, out: Tensor
    ) -> Tensor:
        name = layer.layer_name
        cache, first = self.scratch.views[name]
        saved = self.saved[name] = []
        for turn in self.rounds:
            for source, start, end in turn.copies:
                cache[first + start : first + end] = cache[source]
            saved.append((key.index_select(0, turn.written), value.index_select(0, turn.written)))
            impl.do_kv_cache_update(layer, *saved[-1], cache, turn.slots[name])
            turn.native.block_table = turn.tables[name]
            impl.forward(layer, query[turn.rows], key, value, cache, turn.native, out[turn.rows])
        return out


def native_metadata(
    builder: Any, lengths: list[int], seq_lens: list[int], block_table: Tensor, slots: Tensor, **more: Tensor
) -> Any:
    """vLLM's own metadata for some requests, their rows packed.

    Args:
        builder: vLLM's metadata builder of the layers' group.
        lengths, seq_lens: rows of each request, and its tokens in the cache with them.
        block_table: [R, blocks].
        slots: [rows] int64.
        more: arguments of a builder for recurrent states.
    """
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    ends = torch.tensor(seq_lens, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        num_reqs=len(lengths),
        num_actual_tokens=len(slots),
        max_query_len=max(lengths),
        max_seq_len=max(seq_lens),
        block_table_tensor=block_table,
        slot_mapping=slots,
        causal=True,
    )
    return builder.build(0, common, **more)
