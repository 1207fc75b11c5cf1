"""Contexts of the draft outside of the paged cache, kept from step to step."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.engine.common.attention import TreeMetadata
from vllm_adaptive_tree.engine.common.contexts import ROOM, Contexts, PagedContexts, finite

ROWS, TOKENS = 8, 256
"""Rows and tokens by which memory grows."""
SPARE = 4
"""Ratio to the need of the batch above which memory shrinks, if it also holds more than `LARGE` tokens."""
LARGE = 1 << 14
SHARE = 2
"""Tokens of the paged cache to one that may be kept: float32 then takes no more than the draft's part of the cache."""


class KeptContexts:
    """K/V of the tokens that the draft has read, one row per request of the batch, in vLLM's order.

    Nothing is kept before the first tree with a second level. Tokens that a row lacks then, or after a prefix hit, are
    copied out of the paged cache once. The nodes of a tree come before its context, for one step. A batch that would
    need more than `most` tokens, all rows as long as the longest, is read out of the paged cache at every level.
    """

    def __init__(self) -> None:
        self.most = LARGE
        self.room, self.rows, self.tokens = ROOM, 0, 0
        self.requests: list[str | None] = []
        self.length: list[int] = []  # leading tokens of each that are kept
        self.layers: dict[str, Tensor] = {}  # [2, rows, room + tokens, Hkv, D] float32: keys, values

    def follow(self, requests: Sequence[str | None]) -> None:
        """Move the rows to those of the current batch."""
        if self.requests == requests:
            return
        before = {name: row for row, name in enumerate(self.requests) if name is not None}
        old = [before.get(name) if name is not None else None for name in requests]
        length = [0 if row is None else self.length[row] for row in old]
        if self._too_many(max(len(requests), len(self.requests)), self.tokens):
            self._drop()
            old, length = [None] * len(requests), [0] * len(requests)
        self._fit(max(len(requests), len(self.requests)), self.tokens)
        moved = [(row, then) for row, then in enumerate(old) if then is not None and then != row]
        if moved:
            to, of = (list(side) for side in zip(*moved, strict=True))
            for whole in self.layers.values():
                whole[:, to] = whole[:, of]
        self.requests, self.length = list(requests), length

    def begin_cache(self, blocks: int, block_size: int) -> None:
        """Bound what is kept by the size of the paged cache."""
        self.most = max(blocks * block_size // SHARE, LARGE)

    def forget(self, requests: Collection[str]) -> None:
        """Drop requests that have ended; another may come with the same name."""
        for row, name in enumerate(self.requests):
            if name in requests:
                self.requests[row], self.length[row] = None, 0

    def places(self, row: np.ndarray, position: np.ndarray, spans: Sequence[tuple[int, int, int]]) -> Tensor | None:
        """Places to write the tokens [T] of the next forward to, int64; None while nothing is kept.

        Args:
            row, position: [T] of each token.
            spans: row, first position and end of each request.
        """
        if not self.layers:
            return None
        longest = max(*self.length, *(end for _, _, end in spans))
        if self._too_many(len(self.requests), longest):
            self._drop()
            return None
        self._fit(len(self.requests), longest)
        for span_row, start, end in spans:
            self.length[span_row] = end if start <= self.length[span_row] else 0
        return torch.from_numpy(row * (self.room + self.tokens) + self.room + position)

    def write(self, layer: str, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value [T or more, Hkv, D] of the tokens at `places`."""
        for whole, new in zip(self.layers[layer], (key, value), strict=True):
            whole.flatten(0, 1).index_copy_(0, places, finite(new[: len(places)].float()))

    def of(self, rows: list[int], ends: list[int], block_table: Tensor, block_size: int) -> Contexts:
        """Contexts of these rows for one step, `ends` tokens each; `block_table`: [R, blocks]."""
        if self._too_many(len(self.requests), max(ends)):
            self._drop()
            return PagedContexts(block_table, block_size, stay=False)
        return OpenContexts(self, rows, ends, block_table)

    def _too_many(self, rows: int, tokens: int) -> bool:
        return rows * _up(tokens, TOKENS) > self.most

    def _drop(self) -> None:
        self.layers, self.rows, self.tokens = {}, 0, 0
        self.length = [0] * len(self.length)

    def _fit(self, rows: int, tokens: int, room: int = 0) -> None:
        """Allocate memory for so many rows and tokens, and not much more."""
        needed, rows, tokens = rows, _up(rows, ROWS), _up(tokens, TOKENS)
        if rows * tokens > self.most:
            rows = needed
        held, room = self.rows * self.tokens, max(room, self.room)
        larger = max(rows, self.rows), max(tokens, self.tokens)
        if not (held > LARGE and held > SPARE * rows * tokens) and larger[0] * larger[1] <= self.most:
            rows, tokens = larger
        if (rows, tokens, room) == (self.rows, self.tokens, self.room):
            return
        kept_rows, kept_tokens = min(rows, self.rows), min(tokens, self.tokens)
        for name, old in self.layers.items():
            whole = self.layers[name] = old.new_zeros(2, rows, room + tokens, *old.shape[3:])
            whole[:, :kept_rows, room : room + kept_tokens] = old[:, :kept_rows, self.room : self.room + kept_tokens]
        self.rows, self.tokens, self.room = rows, tokens, room


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


class OpenContexts:
    """Rows of `KeptContexts` for the levels of one step: `Contexts`."""

    stay = True

    def __init__(self, kept: KeptContexts, rows: list[int], ends: list[int], block_table: Tensor):
        self.kept, self.rows, self.ends, self.block_table = kept, rows, ends, block_table
        self.width = -(-max(ends) // 16) * 16
        self.lacking = [at for at, (row, end) in enumerate(zip(rows, ends, strict=True)) if kept.length[row] < end]

    @property
    def room(self) -> int:
        return self.kept.room

    @room.setter
    def room(self, room: int) -> None:
        """Set the room of the next step."""
        self.kept._fit(self.kept.rows, self.kept.tokens, room)

    def open(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Open a layer, as `Contexts.open`: a view, or a copy if these are not the first rows. Nodes of earlier steps
        fill the room."""
        kept, name = self.kept, layer.layer_name
        if self.lacking:
            parts = layer.impl.gather(layer, kv_cache, self.block_table[self.lacking])
            if name not in kept.layers:
                kept._fit(len(kept.requests), max(self.ends))
                _, heads, _, dim = parts[0].shape
                kept.layers[name] = parts[0].new_zeros(2, kept.rows, kept.room + kept.tokens, heads, dim)
            for at, key, value in zip(self.lacking, *parts, strict=True):
                row, end = self.rows[at], self.ends[at]
                kept.length[row] = end
                for whole, part in zip(kept.layers[name], (key, value), strict=True):
                    whole[row, kept.room : kept.room + end] = part[:, :end].transpose(0, 1)
        whole = kept.layers[name][:, :, : kept.room + self.width]
        whole = whole[:, : len(self.rows)] if self.rows == list(range(len(self.rows))) else whole[:, self.rows]
        key, value = whole.transpose(2, 3).unbind()
        return key, value


@dataclass(frozen=True, slots=True)
class CatchUpMetadata(TreeMetadata):
    """A draft forward over tokens of the batch, by vLLM's own attention; their K/V is kept for later levels."""

    native: Any
    contexts: KeptContexts
    places: Tensor  # [tokens] int64

    def attend(
        self, impl: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, out: Tensor
    ) -> Tensor:
        self.contexts.write(layer.layer_name, self.places, key, value)
        result: Tensor = impl.forward(layer, query, key, value, kv_cache, self.native, out)
        return result
