"""Seconds of a step's phases: on a GPU between events of its stream, without waiting for them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

VERIFY = "verify"
DRAFT = "draft"
"""Phase that ends after the step's tokens are there: what is read with them is that of the step before."""
GROW = "grow"
"""Part of it: the growth of trees, from the logits of the roots on; their forward is before it."""


class DraftMarks(NamedTuple):
    """Marks of a step's drafting."""

    begin: Any
    end: Any
    growth: tuple[Any, Any] | None
    """Begin and end of the growth of trees; None: none grew."""

    def seconds(self) -> tuple[float, float]:
        """Seconds of all of it, and of the growth."""
        return seconds(self.begin, self.end), 0.0 if self.growth is None else seconds(*self.growth)


class PhaseTimes:
    def __init__(self, device: torch.device):
        self.on_gpu = torch.empty(0, device=device).is_cuda
        self.marks: dict[str, tuple[Any, Any]] = {}
        """Begin and end of each phase of this step."""
        self.draft: DraftMarks | None = None
        """Those of the last step."""

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
        last, growth = self.draft, taken.pop(GROW, None)
        self.draft = DraftMarks(*taken.pop(DRAFT), growth) if DRAFT in taken else None
        if last is not None:
            taken[DRAFT] = last.begin, last.end
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


def reached(mark: Any) -> None:
    """Wait until the device has passed a mark."""
    if not isinstance(mark, float):
        mark.synchronize()
