"""CPU load of other programs during a measurement."""

import time
from collections.abc import Iterable

import psutil  # type: ignore[import-untyped]


class BackgroundLoad:
    """Measures from construction until `cores` is called; `processes` are the measured ones, which do not count."""

    def __init__(self, processes: Iterable[int]):
        self.processes = [psutil.Process(process) for process in processes]
        self.started, self.before = time.perf_counter(), self._seconds()

    def cores(self) -> float:
        """Cores that other programs used, on average."""
        return max(0.0, (self._seconds() - self.before) / (time.perf_counter() - self.started))

    def _seconds(self) -> float:
        machine = psutil.cpu_times()
        measured = [process.cpu_times() for process in self.processes]
        return float(machine.user + machine.nice + machine.system - sum(one.user + one.system for one in measured))
