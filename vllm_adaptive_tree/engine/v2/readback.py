"""Asynchronous copies from the device to the host, read two steps later without a sync."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class _Copy(NamedTuple):
    host: Tensor
    ready: torch.Event | None
    callback: Callable[[Tensor], None]


class AsyncReadback:
    def __init__(self) -> None:
        self.steps: deque[list[_Copy]] = deque([[]])

    def send(self, values: Tensor, callback: Callable[[Tensor], None]) -> None:
        """Call `callback` with `values` on the host, in the step after the next."""
        if values.device.type == "cpu":
            self.steps[-1].append(_Copy(values, None, callback))
            return
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        ready = torch.Event(values.device)
        ready.record()
        self.steps[-1].append(_Copy(host, ready, callback))

    def next_step(self) -> None:
        """Deliver what was sent in the step before the last, whether it is ready or not: every rank reads the same."""
        self.steps.append([])
        while len(self.steps) > 2:
            for host, ready, callback in self.steps.popleft():
                if ready is not None:
                    ready.synchronize()
                callback(host)
