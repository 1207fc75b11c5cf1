"""Causal sequences of one round of a verification, built on the host."""

from typing import Any

import torch

from vllm_adaptive_tree.engine.v1.attention import AttentionRound, native_metadata


class Sequences:
    """Builder of a round. It allocates scratch blocks from both ends: copies of a block of the context from the bottom,
    so that those of one request are neighbours, and empty blocks from the top."""

    def __init__(self, block_size: int, scratch: int):
        self.block_size = block_size
        self.requests: list[int] = []  # of each sequence
        self.lengths: list[int] = []  # rows that attend
        self.ends: list[int] = []  # tokens in the cache with them
        self.rows: list[int] = []  # of the flat batch that attend
        self.written: list[int] = []  # rows of the flat batch with K/V to write: first those with a home
        self.homes: list[int] = []  # rows that have the slots for these
        self.slots: list[int] = []  # for the others, in scratch blocks
        self.table: list[tuple[int, int, int]] = []  # sequence, column, scratch block
        self.copies: list[tuple[int, int, int, int]] = []  # request, column; scratch blocks [start, end)
        self.bottom, self.top = 0, scratch

    def add(self, request: int, rows: list[int], end: int) -> None:
        """Add rows in the slots that vLLM gave them."""
        self.requests.append(request)
        self.lengths.append(len(rows))
        self.ends.append(end)
        self.rows += rows

    def add_first_branch(self, request: int, first: int, computed: int, branch: list[int]) -> None:
        """Add the root, in row `first`, and a branch in the slots of its depths, after `computed` tokens and it."""
        self.add(request, [first, *(first + 1 + node for node in branch)], computed + 1 + len(branch))
        for depth, node in enumerate(branch, 1):
            if node + 1 != depth:
                self.written.append(first + 1 + node)
                self.homes.append(first + depth)

    def fits(self, computed: int, length: int) -> bool:
        first, last = (computed + 1) // self.block_size, (computed + length) // self.block_size
        return last - first + 1 <= self.top - self.bottom

    def add_branch(self, request: int, first: int, computed: int, path: list[int], length: int) -> None:
        """Add the last `length` nodes of `path`, which begins at a child of the root; all of it in scratch blocks."""
        sequence, size = len(self.requests), self.block_size
        self.add(request, [first + 1 + node for node in path[-length:]], computed + 1 + len(path))
        blocks: dict[int, int] = {}  # column -> scratch block
        for position, node in enumerate(path, computed + 1):
            column, offset = divmod(position, size)
            if column not in blocks:
                blocks[column] = self._empty() if offset == 0 else self._copy(request, column)
                self.table.append((sequence, column, blocks[column]))
            self.written.append(first + 1 + node)
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

    def round(self, builder: Any, native: Any) -> AttentionRound:
        """Metadata of this round. Args: as of `Verification.metadata`."""
        table = native.block_table[self.requests]
        step = torch.zeros_like(table)
        if self.table:
            at = tuple(torch.tensor(self.table).T)
            table[at[:2]], step[at[:2]] = at[2].to(table.dtype), 1
        sources = native.block_table[[copy[0] for copy in self.copies], [copy[1] for copy in self.copies]].tolist()
        return AttentionRound(
            torch.tensor(self.rows),
            torch.tensor(self.written, dtype=torch.int64),
            [(source, *copy[2:]) for source, copy in zip(sources, self.copies, strict=True)],
            torch.cat([native.slot_mapping[self.homes], torch.tensor(self.slots, dtype=torch.int64)]),
            torch.tensor([0] * len(self.homes) + [self.block_size] * len(self.slots), dtype=torch.int64),
            table,
            step,
            native_metadata(builder, self.lengths, self.ends, table, native.slot_mapping[self.rows]),
        )
