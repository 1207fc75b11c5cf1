"""The target's states that a head has not read yet: while it rests, its reading waits and then costs one forward."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.v1.catch_up import CatchUp

LONGEST = 64
"""Most positions of a request that wait."""


class UnreadStates:
    """What waits, by request. A block of the cache that other requests may share is never left incomplete behind."""

    def __init__(self) -> None:
        self.waiting: dict[str, CatchUp] = {}

    def forget(self, requests: Collection[str]) -> None:
        for name in requests:
            self.waiting.pop(name, None)

    def to_read(
        self,
        pending: Sequence[CatchUp],
        states: Sequence[Tensor] | None,
        names: Sequence[str],
        *,
        drafting: bool,
        block_size: int | None,
    ) -> list[CatchUp]:
        """Items that the head reads in this step, each with what waited before it. All of them if it is `drafting`,
        else those that are too long or complete a block.

        Args:
            states: the target's of this step, as in `V1Drafter.catch_up`.
            names: of the requests, by row.
            block_size: positions of a block; None: no request shares another's.
        """
        items, waits = [], list[CatchUp]()
        for new in pending:
            item = _joined(self.waiting.pop(names[new.row], None), new)
            end = item.start + len(item.tokens)
            completes = block_size is not None and end // block_size > item.start // block_size
            if drafting:
                items.append(item)
            elif states is None or len(item.tokens) > LONGEST or completes:
                items.append(item._replace(root=None))
            else:
                waits.append(item)
        if waits:
            assert states is not None
            for item, new_states in zip(waits, _states_of(waits, states), strict=True):
                self.waiting[names[item.row]] = item._replace(states=(), waited=(*item.waited, new_states))
        return items


def read_states(items: Sequence[CatchUp], states: Sequence[Tensor]) -> Tensor:
    """The target's states at the tokens of the items, [tokens, H]."""
    parts = zip(items, _states_of(items, states), strict=True)
    return torch.cat([part for item, new in parts for part in (*item.waited, new)])


def _states_of(items: Sequence[CatchUp], states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The target's states of this step, [n, H] of each item."""
    rows = [row for item in items for row in item.states]
    return torch.cat([state[rows] for state in states], -1).split([len(item.states) for item in items])


def _joined(waiting: CatchUp | None, new: CatchUp) -> CatchUp:
    """The `new` item behind what waits before it; a request that has gone back waits for less, or begins anew."""
    count = -1 if waiting is None else new.start - waiting.start
    if waiting is None or not 0 < count <= len(waiting.tokens):
        return new
    waited = waiting.waited if count == len(waiting.tokens) else (torch.cat(waiting.waited)[:count],)
    return new._replace(start=waiting.start, tokens=[*waiting.tokens[:count], *new.tokens], waited=waited)
