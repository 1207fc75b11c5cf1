"""Causal sequences of one round of a verification, built on the host."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_adaptive_tree.engine.v1.attention import AttentionRound, native_metadata


class Sequences:
    """Builder of a round. It allocates scratch blocks from both ends: copies of a block of the context from the bottom,
    so that those of one request are neighbours, and empty blocks from the top."""

    def __init__(self, block_size: int, scratch: int, first: int = 0):
        self.block_size = block_size
        self.first = self.end = first
        """Rows of the flat batch that attend."""
        self.requests: list[int] = []  # of each sequence
        self.lengths: list[int] = []  # rows of each
        self.ends: list[int] = []  # tokens in the cache with them
        self.written: list[int] = []  # rows of the flat batch with K/V to write
        self.slots: list[int] = []  # for these, in scratch blocks
        self.table: list[tuple[int, int, int]] = []  # sequence, column, scratch block
        self.copies: list[tuple[int, int, int, int]] = []  # request, column; scratch blocks [start, end)
        self.bottom, self.top = 0, scratch

    def add(self, request: int, length: int, end: int) -> None:
        """Add the next rows of the flat batch, in the slots that vLLM gave them."""
        self.requests.append(request)
        self.lengths.append(length)
        self.ends.append(end)
        self.end += length

    def fits(self, computed: int, length: int) -> bool:
        first, last = (computed + 1) // self.block_size, (computed + length) // self.block_size
        return last - first + 1 <= self.top - self.bottom

    def add_branch(self, request: int, path: list[int], computed: int, length: int) -> None:
        """Add a branch, the next `length` rows of the flat batch; all of it in scratch blocks.

        Args:
            path: rows from the root to its leaf.
            computed: tokens before the root.
        """
        sequence, size = len(self.requests), self.block_size
        self.add(request, length, computed + len(path))
        blocks: dict[int, int] = {}  # column -> scratch block
        own = int((computed + 1) % size == 0)  # the root's block is whole: no copy of it
        for position, row in enumerate(path[own:], computed + own):
            column, offset = divmod(position, size)
            if column not in blocks:
                blocks[column] = self._empty() if offset == 0 else self._copy(request, column)
                self.table.append((sequence, column, blocks[column]))
            self.written.append(row)
            self.slots.append(blocks[column] * size + offset)

    def _empty(self) -> int:
        self.top -= 1
        return self.top

    def _copy(self, request: int, column: int) -> int:
        start = self.bottom
        if self.copies and self.copies[-1][:2] == (request, column):
            start = self.copies.pop()[2]
        self.bottom += 1
        self.copies.append((request, column, start, self.bottom))
        return self.bottom - 1

    def round(self, builder: Any, native: Any, firsts: Mapping[str, int]) -> AttentionRound:
        """Metadata of this round. Args: as of `Verification.metadata`; `firsts`: blocks before the scratch blocks, by
        layer."""
        table, slots = native.block_table[self.requests], torch.tensor(self.slots, dtype=torch.int64)
        before = native.slot_mapping if self.first == 0 else slots[:0]
        written = torch.cat([torch.arange(len(before)), torch.tensor(self.written, dtype=torch.int64)])
        step, first = torch.zeros_like(table), torch.tensor([*firsts.values()])
        if self.table:
            at = tuple(torch.tensor(self.table).T)
            table[at[:2]], step[at[:2]] = at[2].to(table.dtype), 1
        tables = table + step * first.to(table.dtype)[:, None, None]
        sources = native.block_table[[copy[0] for copy in self.copies], [copy[1] for copy in self.copies]].tolist()
        rows = slice(self.first, self.end)
        own = slots + first[:, None] * self.block_size
        return AttentionRound(
            rows,
            written,
            [(source, *copy[2:]) for source, copy in zip(sources, self.copies, strict=True)],
            dict(zip(firsts, torch.cat([before.expand(len(own), -1), own], 1), strict=True)),
            dict(zip(firsts, tables, strict=True)),
            native_metadata(builder, self.lengths, self.ends, table, native.slot_mapping[rows]),
        )
