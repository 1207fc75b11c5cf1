"""The target's states that a head leaves for its next reading, where nothing may be read out of order: by request."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, states_of_step

LONGEST = 64
"""Most positions of a request that wait."""


class ShortWait:
    """What waits, at rest. A block of the cache that other requests may share is never left incomplete behind."""

    def __init__(self, block_size: int | None):
        """`block_size`: positions of a block; None: no request shares another's."""
        self.block_size = block_size
        self.waiting: dict[str, CatchUp] = {}

    def forget(self, requests: Collection[str]) -> None:
        for name in requests:
            self.waiting.pop(name, None)

    def to_read(
        self, pending: Sequence[CatchUp], states: Sequence[Tensor], names: Sequence[str], *, drafting: bool
    ) -> list[CatchUp]:
        """Items that the head reads in this step, each with what waited before it. All of them if it is `drafting`,
        else those that are too long or complete a block.

        Args:
            states: the target's of this step, as in `V1Drafter.catch_up`.
            names: of the requests, by row.
        """
        items, waits = [], list[CatchUp]()
        for new in pending:
            item = _joined(self.waiting.pop(names[new.row], None), new)
            end = item.start + len(item.tokens)
            completes = self.block_size is not None and end // self.block_size > item.start // self.block_size
            if drafting:
                items.append(item)
            elif len(item.tokens) > LONGEST or completes:
                items.append(item._replace(root=None))
            else:
                waits.append(item)
        if waits:
            for item, own in zip(waits, states_of_step(waits, states), strict=True):
                self.waiting[names[item.row]] = item._replace(states=(), waited=(*item.waited, own))
        return items


def _joined(waiting: CatchUp | None, new: CatchUp) -> CatchUp:
    """The `new` item behind what waits before it; a request that has gone back waits for less, or begins anew."""
    count = -1 if waiting is None else new.start - waiting.start
    if waiting is None or not 0 < count <= len(waiting.tokens):
        return new
    waited = waiting.waited if count == len(waiting.tokens) else (torch.cat(waiting.waited)[:count],)
    return new._replace(start=waiting.start, tokens=[*waiting.tokens[:count], *new.tokens], waited=waited)
