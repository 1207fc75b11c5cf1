"""Asynchronous copies from the device to the host, read two steps later without a sync."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class HostCopy(NamedTuple):
    host: Tensor
    ready: torch.Event | None

    @classmethod
    def of(cls, values: Tensor) -> "HostCopy":
        """Begin a copy of values that do not change."""
        if values.device.type == "cpu":
            return cls(values, None)
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        ready = torch.Event(values.device)
        ready.record()
        return cls(host, ready)

    def read(self) -> Tensor:
        """Return the values, once they are there."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.host


class AsyncReadback:
    def __init__(self) -> None:
        self.steps: deque[list[tuple[HostCopy, Callable[[Tensor], None]]]] = deque([[]])

    def send(self, values: Tensor, callback: Callable[[Tensor], None]) -> None:
        """Call `callback` with `values` on the host, in the step after the next."""
        self.steps[-1].append((HostCopy.of(values), callback))

    def next_step(self) -> None:
        """Deliver what was sent in the step before the last, waiting if it is not ready: every rank reads the same."""
        self.steps.append([])
        while len(self.steps) > 2:
            for copy, callback in self.steps.popleft():
                callback(copy.read())
