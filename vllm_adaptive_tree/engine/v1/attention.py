"""Verification by vLLM's CPU attention: every branch of a tree is a causal sequence for its native kernel."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from vllm_adaptive_tree.engine.common.attention import CPUTreeAttention, TreeMetadata
from vllm_adaptive_tree.engine.v1.scratch import ScratchBlocks


@dataclass(frozen=True, slots=True)
class AttentionRound:
    """Sequences that attend together: plain rows and first branches over the request's own blocks, other branches over
    scratch blocks. These are behind a layer's own blocks, so its tables and slots are its own."""

    rows: slice  # of the flat batch, which attend
    written: Tensor
    """[W] int64: rows with K/V to write, a node once for every branch through it; in the first round all rows of the
    flat batch before these, in the slots that vLLM gave them."""
    copies: list[tuple[int, int, int]]
    """A block of the context, and the scratch blocks [start, end), counted from 0, that begin as it."""
    slots: dict[str, Tensor]  # layer -> [W] int64
    tables: dict[str, Tensor]  # layer -> [sequences, B] int32: block table
    native: CPUAttentionMetadata  # with the block table of the layer that attends


@dataclass(frozen=True, slots=True)
class VerifyMetadata(TreeMetadata):
    """Metadata of trees cut into branches, each a causal sequence for vLLM's native kernel.

    The rows of a tree come depth first, so each branch is consecutive rows, and the first one is in the request's own
    slots. The others have scratch blocks in place of those that they do not share with the first, so one call of the
    kernel reads them all; commit needs their K/V again.
    """

    rounds: list[AttentionRound]  # mostly one; more if the branches of a batch outnumber the scratch blocks
    saved: dict[str, tuple[Tensor, Tensor]]  # layer -> key, value [rows or more, Hkv, D]
    scratch: ScratchBlocks

    def write(self, impl: "VerifyAttention", turn: AttentionRound, layer: Any, key: Tensor, value: Tensor) -> None:
        """Write the K/V of a round."""
        cache, first = self.scratch.views[layer.layer_name]
        for source, start, end in turn.copies:
            cache[first + start : first + end] = cache[source]
        written = key.index_select(0, turn.written), value.index_select(0, turn.written)
        self.saved.setdefault(layer.layer_name, written)
        impl.write_rows(layer, *written, cache, turn.slots[layer.layer_name])

    def attend(
        self, impl: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, out: Tensor
    ) -> Tensor:
        name = layer.layer_name
        cache, _ = self.scratch.views[name]
        for turn in self.rounds:
            if turn is not self.rounds[0]:  # that is written
                self.write(impl, turn, layer, key, value)
            turn.native.block_table = turn.tables[name]
            impl.forward(layer, query[turn.rows], key, value, cache, turn.native, out[turn.rows])
        return out


class VerifyAttention(CPUTreeAttention):
    """Mixin before vLLM's CPU attention. Where vLLM writes the K/V of a verification to the cache, that of all branches
    is written in the same call."""

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        metadata = get_forward_context().attn_metadata if is_forward_context_available() else None
        trees = metadata.get(layer.layer_name) if isinstance(metadata, dict) else None
        if isinstance(trees, VerifyMetadata):
            trees.write(self, trees.rounds[0], layer, key, value)
        else:
            self.write_rows(layer, key, value, kv_cache, slots)

    def write_rows(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Write K/V [T, Hkv, D] to slots [T], as vLLM does."""
        super().do_kv_cache_update(layer, key, value, cache, slots)  # type: ignore[misc]


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
