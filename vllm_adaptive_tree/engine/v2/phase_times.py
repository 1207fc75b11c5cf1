"""Seconds of a step's phases: on a GPU between events of its stream, without waiting for them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

VERIFY = "verify"
DRAFT = "draft"
"""Phase that ends after the step's tokens are there: what is read with them is that of the step before."""


class PhaseTimes:
    def __init__(self, device: torch.device):
        self.on_gpu = torch.empty(0, device=device).is_cuda
        self.marks: dict[str, tuple[Any, Any]] = {}
        """Begin and end of each phase of this step."""
        self.draft: tuple[Any, Any] | None = None
        """Begin and end of the last step's draft."""

    @contextmanager
    def phase(self, name: str, *, dummy: bool = False) -> Iterator[None]:
        """Mark the begin and end of a phase. `dummy`: vLLM warms up, or measures memory, which is not counted."""
        begin = None if dummy else self._mark()
        yield
        if begin is not None:
            self.marks[name] = begin, self._mark()

    def take(self) -> Callable[[], dict[str, float]]:
        """Function that gives the seconds by phase since the last call; to be called after the tokens are read."""
        taken, self.marks = self.marks, {}
        last, self.draft = self.draft, taken.pop(DRAFT, None)
        if last is not None:
            taken[DRAFT] = last
        return lambda: {name: seconds(*marks) for name, marks in taken.items()}

    @property
    def begun(self) -> Any:
        """Mark of the begin of this step's verification; None: it was a dummy's."""
        return self.marks[VERIFY][0] if VERIFY in self.marks else None

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def seconds(begin: Any, end: Any) -> float:
    """Seconds between two marks that the device has passed."""
    return float(end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1000


def passed(mark: Any) -> bool:
    return isinstance(mark, float) or bool(mark.query())
