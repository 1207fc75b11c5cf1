"""The drafter of the benchmark: `Llama` over the trees of many requests at once."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.papers.llama import Cache, Llama
from vllm_adaptive_tree.drafters import Rows


class Drafter:
    """`drafters.Drafter` over `Llama`; slot s of a tree lies s places behind the root."""

    def __init__(self, model: Llama, cache: Cache, root: Tensor):
        self.model, self.cache, self.root = model, cache, root  # root: its position [R]

    def catch_up(self, accepted: Tensor, target_hidden: Tensor | None = None) -> tuple[Rows, tuple[Tensor, Tensor]]:
        """`accepted` [R, A]: the last tokens up to the root, -1 behind."""
        count = (accepted >= 0).sum(1)
        place = self.root[:, None] + 1 - count[:, None] + torch.arange(accepted.shape[1])
        place = torch.where(accepted >= 0, place, 0)
        visible = torch.arange(int(self.root.max()) + 1) <= place[:, :, None]
        hidden = self.model.read(self.cache, accepted, place, place, visible, None)
        hidden = hidden[torch.arange(len(count)), count - 1][:, None]
        ancestors = torch.ones(len(count), 1, 1, dtype=torch.bool)  # [R, slots, slots]
        return Rows(self.model.logits(hidden), hidden), (ancestors, torch.zeros(len(count), 1, dtype=torch.int64))

    def grow(self, tokens: Tensor, parent: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Rows, tuple[Tensor, Tensor]]:
        above, depth = state
        requests, width = tokens.shape
        slots = above.shape[1]
        new = torch.eye(width, dtype=torch.bool).expand(requests, -1, -1)
        new = torch.cat([above.gather(1, parent[:, :, None].expand(-1, -1, slots)), new], 2)  # [R, W, slots + W]
        above = torch.cat([torch.nn.functional.pad(above, (0, width)), new], 1)
        own = depth.gather(1, parent) + 1
        slot = torch.arange(int(self.root.max()) + slots + width) - self.root[:, None]  # [R, S]
        seen = new.gather(2, slot.clamp(0, slots + width - 1)[:, None].expand(-1, width, -1))
        visible = (slot <= 0)[:, None] | (seen & (slot < slots + width)[:, None])
        places = self.root[:, None] + slots + torch.arange(width)
        hidden = self.model.read(self.cache, tokens, self.root[:, None] + own, places, visible, None)
        return Rows(self.model.logits(hidden), hidden), (above, torch.cat([depth, own], 1))


class Counted:
    """Counts the forwards that each request took part in."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.forwards = drafter, torch.ones_like(drafter.root)

    def catch_up(self, accepted: Any, target_hidden: Tensor | None) -> tuple[Rows, Any]:
        return self.drafter.catch_up(accepted, target_hidden)

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        self.forwards = self.forwards + (tokens >= 0).any(1)
        return self.drafter.grow(tokens, parent, state)
