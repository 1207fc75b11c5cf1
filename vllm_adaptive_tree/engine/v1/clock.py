"""Seconds that a step spends in each phase."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of a block, or of a function that this decorates, to the phase `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken, self.seconds = self.seconds, defaultdict(float)
        return dict(taken)
