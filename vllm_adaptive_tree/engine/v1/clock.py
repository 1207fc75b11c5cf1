"""Seconds that a step spends in each phase."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class PhaseClock:
    """Seconds spent in each phase of a decoding step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def timed(self, name: str, call: Callable[P, T]) -> Callable[P, T]:
        """The same, counted as that phase."""

        def timing(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.phase(name):
                return call(*args, **kwargs)

        return timing

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken, self.seconds = self.seconds, defaultdict(float)
        return dict(taken)
