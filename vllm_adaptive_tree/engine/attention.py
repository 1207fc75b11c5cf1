"""Tree attention inside vLLM's CPU backend: verification walks paths with the native kernel, drafting uses a mask."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_adaptive_tree.attention.cpu import attend, context_bias, gather_context
from vllm_adaptive_tree.trees import SlicedMask


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The rows of a draft forward that belong to trees, the last ones, and where each stands in the padded [R, T]."""

    first: int  # row in the flat batch
    places: Tensor  # [M] int64: r * T + t, increasing
    shape: tuple[int, int]  # R, T

    @property
    def full(self) -> bool:
        """Every place is used: row after row, without padding."""
        return len(self.places) == self.shape[0] * self.shape[1]

    def pad(self, flat: Tensor) -> Tensor:
        """[tokens, H, D] -> [R, T, H, D]; unused places hold zeros."""
        rows = flat[self.first :]
        if not self.full:
            padded = rows.new_zeros(self.shape[0] * self.shape[1], *rows.shape[1:])
            rows = padded.index_copy_(0, self.places, rows)
        return rows.unflatten(0, self.shape)

    def unpad(self, padded: Tensor) -> Tensor:
        """[R, T, H, D] -> [M, H, D]."""
        flat = padded.flatten(0, 1)
        return flat if self.full else flat.index_select(0, self.places)


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


@dataclass(frozen=True, slots=True)
class DraftMetadata:
    """A draft forward: `native` serves the first rows, which read accepted tokens, `keys` the rows of the trees."""

    native: CPUAttentionMetadata | None
    keys: "DraftKeys"


class TreeAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, plus trees. With vLLM's own metadata it is vLLM's own."""

    @classmethod
    def adopt(cls, layer: Any) -> None:
        """Put this class in the place of the layer's implementation, for one engine's layers only."""
        impl = cls.__new__(cls)
        impl.__dict__.update(layer.impl.__dict__)
        layer.impl = impl

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
        if isinstance(attn_metadata, VerifyMetadata):
            return self._verify(layer, query, key, value, kv_cache, attn_metadata, output)
        if isinstance(attn_metadata, DenseTrees):
            return self._dense(layer, query, key, value, kv_cache, attn_metadata, output)
        if isinstance(attn_metadata, DraftMetadata):
            return self._draft(layer, query, key, value, kv_cache, attn_metadata, output)
        scales = (output_scale, output_block_scale)
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)

    def _verify(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, step: VerifyMetadata, out: Tensor
    ) -> Tensor:
        keys, values = key.index_select(0, step.nodes), value.index_select(0, step.nodes)
        step.saved[layer.layer_name] = keys, values
        queries = query.index_select(0, step.rows)
        results = torch.empty_like(queries)
        for turn in step.rounds:
            self.do_kv_cache_update(layer, keys[turn.nodes], values[turn.nodes], kv_cache, turn.slots)
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

    def _draft(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, step: DraftMetadata, out: Tensor
    ) -> Tensor:
        if step.native is not None:
            super().forward(layer, query, key, value, kv_cache, step.native, out)
        trees, keys = step.keys.trees, step.keys
        tree_keys, tree_values = keys.read(layer, kv_cache, key, value)
        result = attend(trees.pad(query), tree_keys, tree_values, keys.bias, self.scale)
        out[trees.first :] = trees.unpad(result)
        return out

    def gather(self, layer: Any, kv_cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """As `gather_context`."""
        return gather_context(kv_cache, block_table, layer.isa)


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


class DraftKeys:
    """Keys of a tree that is being drafted: the context, gathered once, then every node read so far.

    Nodes never enter the paged cache; accepted tokens are fed again when the draft catches up.
    """

    def __init__(self, block_table: Tensor, block_size: int, context: Tensor, *, rooted: bool = False):
        """`block_table` [R, blocks], `context` [R] lengths; `rooted`: the root is the last token of the context."""
        self.block_table, self.context = block_table, context
        self.width = block_table.shape[1] * block_size
        self.behind = context_bias(context, self.width)  # [R, 1, width]
        self.scratch: dict[str, tuple[Tensor, Tensor]] = {}  # layer -> key, value [R, Hkv, width + room, D]
        # [R, S, S]: node, its ancestors; a root in the context has a row, which sees none, and no column
        self.seen = torch.zeros(block_table.shape[0], int(rooted), 0, dtype=torch.bool, device=context.device)
        self.bias = torch.empty(0)
        self.trees: TreeRows
        self.level = 0
        self.sliced: SlicedMask | None = None  # of the shape that all trees have, while every level is read in full

    def open_level(self, trees: TreeRows, parent: Tensor) -> None:
        """Prepare the next forward: W new nodes a request below `parent` [R, W], counted as in `Frontier`."""
        requests, before, columns = self.seen.shape
        width = parent.shape[1]
        self.trees = trees
        own = torch.eye(width, dtype=torch.bool, device=parent.device).expand(requests, width, width)
        if self.sliced is not None and self.sliced.ends[self.level] != before + width:
            self.sliced = None
        if self.sliced is not None:
            self.seen = self.sliced.behind(self.level).expand(requests, -1, -1)
        elif before == 0:  # the root
            self.seen = own
        else:
            above = self.seen.gather(1, parent[:, :, None].expand(requests, width, columns))
            old = torch.nn.functional.pad(self.seen, (0, width))
            self.seen = torch.cat([old, torch.cat([above, own], 2)], 1)
        self.level += 1
        tree = torch.where(self.seen[:, before:], 0.0, -torch.inf)
        self.bias = torch.cat([self.behind.expand(-1, width, -1), tree], 2)  # [R, W, width + S]

    def read(self, layer: Any, kv_cache: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        end = self.width + self.seen.shape[2]
        start = end - self.trees.shape[1]
        keys, values = self._room_for(end, layer, kv_cache)
        keys[:, :, start:end] = self.trees.pad(key).transpose(1, 2)
        values[:, :, start:end] = self.trees.pad(value).transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def _room_for(self, end: int, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's scratch, at least `end` long; it doubles its tree part when that is full."""
        old = self.scratch.get(layer.layer_name)
        if old is None:
            old = layer.impl.gather(layer, kv_cache, self.block_table)
        elif old[0].shape[2] >= end:
            return old
        room = max(32, 2 * (end - self.width))
        keys, values = (part.new_empty(*part.shape[:2], self.width + room, part.shape[3]) for part in old)
        keys[:, :, : old[0].shape[2]], values[:, :, : old[1].shape[2]] = old
        self.scratch[layer.layer_name] = keys, values
        return keys, values
