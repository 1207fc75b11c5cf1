"""Seconds that a step spends in each phase: on a GPU between events of its stream, and nothing waits for them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

DRAFT = "draft"
"""The phase behind the step's tokens: what is read with them knows that of the step before."""


class PhaseTimes:
    def __init__(self, device: torch.device):
        self.on_gpu = torch.empty(0, device=device).is_cuda
        self.marks: dict[str, tuple[Any, Any]] = {}
        """Where each phase of this step began and ended."""
        self.draft: tuple[Any, Any] | None = None
        """The same of the last step's draft."""

    @contextmanager
    def phase(self, name: str, *, dummy: bool = False) -> Iterator[None]:
        """`dummy`: vLLM warms up, or measures memory; that is no phase of a step."""
        begin = None if dummy else self._mark()
        yield
        if begin is not None:
            self.marks[name] = begin, self._mark()

    def take(self) -> Callable[[], dict[str, float]]:
        """Seconds by phase since the last call, to be asked for once the step's tokens are read."""
        taken, self.marks = self.marks, {}
        last, self.draft = self.draft, taken.pop(DRAFT, None)
        if last is not None:
            taken[DRAFT] = last
        return lambda: {name: _seconds(*marks) for name, marks in taken.items()}

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: Any, end: Any) -> float:
    return float(end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1000
