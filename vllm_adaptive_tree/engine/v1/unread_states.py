"""The target's states that a head has not read yet: those of steps at rest, and of a prompt until it has a tree.

They wait by block of the cache: a prefix hit on a block that another request has left unread reads them, and a block
that gets new tokens forgets what waited there. What no tree needs is read for want of room alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, states_of_step

MOST = 1 << 28
"""Most bytes of states that wait; then the oldest are read."""
SHARE = 8
"""Part of the room that is made when there is none."""


class Unread(NamedTuple):
    """N positions to read."""

    slots: Tensor  # [N] int64: of the cache
    positions: Tensor  # [N] int64
    tokens: list[int]  # after each position
    states: Tensor  # [N, H]: the target's at each


class Waiting(NamedTuple):
    """Consecutive positions of one block of the cache."""

    block: int
    first: int  # position
    tokens: list[int]
    rows: list[int]  # of `UnreadStates.states`


class UnreadStates:
    def __init__(self, read: Callable[[Unread], Any], tokens: int, most: int = MOST):
        """
        Args:
            read: writes the head's K/V at positions in any order, whatever the cache holds before them; of at most so
                many `tokens`.
            most: bytes.
        """
        self.read, self.tokens, self.most = read, tokens, most
        self.states = torch.empty(0, 0)
        self.free, self.num_free = np.empty(0, np.int64), 0
        """Rows of `states`, of which the first so many are free."""
        self.waiting: dict[int, Waiting] = {}
        """By block; the one that has grown last is the last."""

    def to_read(
        self,
        pending: Sequence[CatchUp],
        states: Sequence[Tensor],
        table: np.ndarray,
        block_size: int,
        *,
        drafting: bool,
    ) -> list[CatchUp]:
        """Items that get a tree, if the step is `drafting`; what waits before them is read. The other items wait, first
        of all: a prefix hit may be on blocks that another request fills in this step.

        Args:
            states: the target's of this step, as in `V1Drafter.catch_up`.
            table: [R, blocks] of the rows of the batch.
        """
        items = [item for item in pending if drafting and item.root is not None]
        waits = [item for item in pending if not drafting or item.root is None]
        if waits:
            self._keep(waits, states, table, block_size)
        before = [self._before(item, table[item.row], block_size) for item in items]
        self._read([waiting for blocks in before for waiting in blocks], block_size)
        late = [sum(len(waiting.rows) for waiting in blocks) for blocks in before]
        return [item._replace(late=count) for item, count in zip(items, late, strict=True)]

    def _before(self, item: CatchUp, table: np.ndarray, block_size: int) -> list[Waiting]:
        """Take what waits before an item; nothing waits in its own blocks then."""
        if not self.waiting:
            return []
        blocks = table[: -(-(item.start + len(item.tokens)) // block_size)].tolist()
        return [
            waiting
            for place, block in enumerate(blocks)
            if block in self.waiting
            for waiting in [self._take(block, place * block_size, item.start)]
            if waiting.rows
        ]

    def _take(self, block: int, start: int, end: int) -> Waiting:
        """Take what waits of a block, which begins at `start` now, up to the position `end`. The rest is of a request
        that has gone back, or had the block before, and is forgotten."""
        waiting = self.waiting.pop(block, None) or Waiting(block, end, [], [])
        count = max(0, end - waiting.first) if waiting.first >= start else 0
        self._release(waiting.rows[count:])
        return waiting._replace(tokens=waiting.tokens[:count], rows=waiting.rows[:count])

    def _keep(self, items: list[CatchUp], states: Sequence[Tensor], table: np.ndarray, block_size: int) -> None:
        new = states_of(items, states)
        if not len(self.free):
            count = max(1, self.most // (new.shape[1] * new.element_size()))
            self.states, self.free, self.num_free = new.new_empty(count, new.shape[1]), np.arange(count), count
        if len(new) > self.num_free:
            self._read_oldest(len(new) + len(self.free) // SHARE, block_size)
        if len(new) > self.num_free:  # more than all the room
            before = [waiting for item in items for waiting in self._before(item, table[item.row], block_size)]
            self._read(before, block_size)
            self.read(unread_of(items, new, table, block_size))
            return
        self.num_free -= len(new)
        rows = self.free[self.num_free : self.num_free + len(new)]
        self.states.index_copy_(0, torch.from_numpy(rows), new)
        given = iter(rows.tolist())
        for item in items:
            end = item.start + len(item.tokens)
            for start in range(item.start // block_size * block_size, end, block_size):
                first = max(start, item.start)
                waiting = self._waiting_up_to(int(table[item.row, start // block_size]), start, first)
                tokens = item.tokens[first - item.start : start + block_size - item.start]
                waiting.tokens.extend(tokens)
                waiting.rows.extend(row for _, row in zip(tokens, given, strict=False))
                self.waiting[waiting.block] = waiting

    def _waiting_up_to(self, block: int, start: int, first: int) -> Waiting:
        """Take what waits of a block, which begins at `start`, right before the position `first`. What ends elsewhere
        is of a request that has gone back, or had the block before, and is forgotten."""
        waiting = self.waiting.get(block)
        if waiting is not None and waiting.first >= start and waiting.first + len(waiting.rows) == first:
            return self.waiting.pop(block)
        waiting = self._take(block, start, first)
        if waiting.first + len(waiting.rows) == first:
            return waiting
        self._release(waiting.rows)
        return Waiting(block, first, [], [])

    def _read_oldest(self, room: int, block_size: int) -> None:
        """Read until so many rows are free, or nothing waits."""
        oldest, freed = list[Waiting](), self.num_free
        for waiting in self.waiting.values():
            if freed >= room:
                break
            oldest.append(waiting)
            freed += len(waiting.rows)
        for waiting in oldest:
            del self.waiting[waiting.block]
        self._read(oldest, block_size)

    def _read(self, parts: list[Waiting], block_size: int) -> None:
        if not parts:
            return
        rows = [row for waiting in parts for row in waiting.rows]
        positions = np.concatenate([np.arange(part.first, part.first + len(part.rows)) for part in parts])
        blocks = np.repeat([part.block for part in parts], [len(part.rows) for part in parts])
        slots = blocks * block_size + positions % block_size
        tokens = [token for waiting in parts for token in waiting.tokens]
        for at in range(0, len(rows), self.tokens):
            some = slice(at, at + self.tokens)
            places = torch.from_numpy(slots[some]), torch.from_numpy(positions[some])
            self.read(Unread(*places, tokens[some], self.states[rows[some]]))
        self._release(rows)

    def _release(self, rows: Sequence[int]) -> None:
        self.free[self.num_free : self.num_free + len(rows)] = rows
        self.num_free += len(rows)


def states_of(items: Sequence[CatchUp], states: Sequence[Tensor]) -> Tensor:
    """The target's states at the tokens of the items, [tokens, H]; `states` of this step."""
    parts = zip(items, states_of_step(items, states), strict=True)
    return torch.cat([part for item, own in parts for part in (*item.waited, own)])


def unread_of(items: Sequence[CatchUp], states: Tensor, table: np.ndarray, block_size: int) -> Unread:
    """All positions of the items; `states` [tokens, H]."""
    lengths = [len(item.tokens) for item in items]
    positions = np.concatenate([np.arange(item.start, item.start + n) for item, n in zip(items, lengths, strict=True)])
    blocks = table[np.repeat([item.row for item in items], lengths), positions // block_size].astype(np.int64)
    slots = torch.from_numpy(blocks * block_size + positions % block_size)
    return Unread(slots, torch.from_numpy(positions), [token for item in items for token in item.tokens], states)
