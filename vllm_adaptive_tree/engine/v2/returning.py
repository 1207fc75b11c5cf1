"""Figures on their way from the device to the host, read in a later step: nobody waits for this one."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class _Sent(NamedTuple):
    host: Tensor
    ready: torch.Event | None
    take: Callable[[Tensor], None]


class Returning:
    def __init__(self) -> None:
        self.sent: deque[list[_Sent]] = deque([[]])

    def send(self, figures: Tensor, take: Callable[[Tensor], None]) -> None:
        """Have `take` called with `figures` on the host, in the step after the next."""
        if figures.device.type == "cpu":
            self.sent[-1].append(_Sent(figures, None, take))
            return
        host = torch.empty_like(figures, device="cpu", pin_memory=True)
        host.copy_(figures, non_blocking=True)
        ready = torch.Event(figures.device)
        ready.record()
        self.sent[-1].append(_Sent(host, ready, take))

    def next_step(self) -> None:
        """What was sent in the step before the last has come: every rank reads the same."""
        self.sent.append([])
        while len(self.sent) > 2:
            for host, ready, take in self.sent.popleft():
                if ready is not None:
                    ready.synchronize()
                take(host)
