"""Tree attention inside a backend of vLLM: what both adapters' layers have in common, and the drafting of trees."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm_adaptive_tree.attention.cpu import attend, context_bias
from vllm_adaptive_tree.trees import SlicedMask


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The rows of a draft forward over nodes of trees, and where each stands in the padded [R, T]."""

    places: Tensor  # [M] int64: r * T + t, increasing
    shape: tuple[int, int]  # R, T

    @property
    def full(self) -> bool:
        """Every place is used: row after row, without padding."""
        return len(self.places) == self.shape[0] * self.shape[1]

    def pad(self, flat: Tensor) -> Tensor:
        """[tokens, H, D] -> [R, T, H, D]; unused places hold zeros."""
        if not self.full:
            padded = flat.new_zeros(self.shape[0] * self.shape[1], *flat.shape[1:])
            flat = padded.index_copy_(0, self.places, flat)
        return flat.unflatten(0, self.shape)

    def unpad(self, padded: Tensor) -> Tensor:
        """[R, T, H, D] -> [M, H, D]."""
        flat = padded.flatten(0, 1)
        return flat if self.full else flat.index_select(0, self.places)


class DraftKeys:
    """Keys of a tree that is being drafted: the context, gathered once, then every node read so far. Also the metadata
    of a draft forward over one level.

    Nodes never enter the paged cache; accepted tokens are fed again when the draft catches up.
    """

    def __init__(self, block_table: Tensor, block_size: int, context: Tensor):
        """`block_table` [R, blocks], `context` [R] lengths, the root included, which is the last token."""
        self.block_table = block_table
        self.width = block_table.shape[1] * block_size
        self.behind = context_bias(context, self.width)  # [R, 1, width]
        self.scratch: dict[str, tuple[Tensor, Tensor]] = {}  # layer -> key, value [R, Hkv, width + room, D]
        # [R, 1 + S, S]: root or node, its ancestors; the root has a row, which sees none, and no column
        self.seen = torch.zeros(block_table.shape[0], 1, 0, dtype=torch.bool, device=context.device)
        self.bias = torch.empty(0)
        self.trees: TreeRows
        self.level = 1  # that comes next; the root is level 0
        self.sliced: SlicedMask | None = None  # of the shape that all trees have, while every level is read in full

    def open_level(self, trees: TreeRows, parent: Tensor) -> None:
        """Prepare the next forward: W new nodes a request below `parent` [R, W], counted as in `Frontier`."""
        requests, before, columns = self.seen.shape
        width = parent.shape[1]
        self.trees = trees
        if self.sliced is not None and self.sliced.ends[self.level] != before + width:
            self.sliced = None
        if self.sliced is not None:
            self.seen = self.sliced.behind(self.level)[:, 1:].expand(requests, -1, -1)
        else:
            own = torch.eye(width, dtype=torch.bool, device=parent.device).expand(requests, width, width)
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


class TreeAttention:
    """Goes before the class of a layer's implementation; with vLLM's own metadata it is vLLM's own."""

    scale: float

    @classmethod
    def adopt(cls, layer: Any) -> None:
        """Put such an implementation in the place of the layer's own; for one engine's layers only."""
        own = type(layer.impl)
        impl: Any = object.__new__(type(f"Tree{own.__name__}", (cls, own), {}))
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
        way = self.ways.get(type(attn_metadata))
        if way is not None:
            return way(self, layer, query, key, value, kv_cache, attn_metadata, output)
        scales = (output_scale, output_block_scale)
        return super().forward(  # type: ignore[misc]
            layer, query, key, value, kv_cache, attn_metadata, output, *scales
        )

    def _draft(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, step: DraftKeys, out: Tensor
    ) -> Tensor:
        keys, values = step.read(layer, kv_cache, key, value)
        return out.copy_(step.trees.unpad(attend(step.trees.pad(query), keys, values, step.bias, self.scale)))

    def gather(self, layer: Any, kv_cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks [R, B] of R requests, to float32: key and value, [R, Hkv, B * block_size, head_size]."""
        raise NotImplementedError

    ways: ClassVar[Mapping[type, Callable[..., Tensor]]] = {DraftKeys: _draft}
    """How to attend, by our metadata."""
