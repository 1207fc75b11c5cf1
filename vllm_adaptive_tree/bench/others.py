"""How busy other programs keep the machine while an engine is measured."""

import time
from collections.abc import Iterable

import psutil  # type: ignore[import-untyped]


class Others:
    """From when it is made until `cores` is asked; `processes` are the measured ones."""

    def __init__(self, processes: Iterable[int]):
        self.processes = [psutil.Process(process) for process in processes]
        self.began, self.before = time.perf_counter(), self._seconds()

    def cores(self) -> float:
        """Cores that other programs used, on average."""
        return max(0.0, (self._seconds() - self.before) / (time.perf_counter() - self.began))

    def _seconds(self) -> float:
        machine = psutil.cpu_times()
        mine = [process.cpu_times() for process in self.processes]
        return float(machine.user + machine.nice + machine.system - sum(one.user + one.system for one in mine))
