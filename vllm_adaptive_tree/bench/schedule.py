"""Order of rounds: every engine of a stage once per cell, then again, until all are done or time is up."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from vllm_adaptive_tree.bench.plan import Cell, Config, Stage
from vllm_adaptive_tree.bench.progress import Progress
from vllm_adaptive_tree.bench.rounds import Measurement, Round, Store


class Engine(Protocol):
    def measure(self, cell: Cell, number: int) -> Measurement:
        """Measure round `number` of a cell; 0 is the warm-up."""

    def close(self) -> None: ...


class Schedule:
    """Runs stages; `start` returns a running engine of a stage, or raises RuntimeError.

    Rounds are interleaved, because a machine drifts: rounds outermost, then cells, then engines in rotating order. A
    cell whose rounds do not fit into the stage's share of the time waits for the next pass, or the next run.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        store: Store,
        rounds: int,
        seconds: float,
        start: Callable[[Stage, Config], Engine],
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.stages, self.store, self.rounds = stages, store, rounds
        self.start, self.progress, self.clock = start, progress, clock
        self.deadline = clock() + seconds
        self.failures: dict[str, str] = {}  # name of a stage -> why it did not run
        self.starting: dict[str, float] = {}  # name of a stage -> seconds to start its engines

    def run(self) -> None:
        """Pass over the stages until a pass finishes no round."""
        self.progress.start(self.turns())
        finished = -1
        while finished < len(self.store.rounds):
            finished = len(self.store.rounds)
            waiting = [stage for stage in self.stages if self._open(stage) and stage.name not in self.failures]
            for place, stage in enumerate(waiting):
                if self._left() > self.starting.get(stage.name, 0.0):
                    try:
                        share = self.turns([stage]) / self.turns(waiting[place:])
                        self._stage(stage, self.clock() + self._left() * share)
                    except RuntimeError as error:
                        self.failures[stage.name] = str(error)
                        self.progress.write(str(error))

    def missing(self, stage: Stage, cell: Cell) -> list[int]:
        return sorted(set(range(1, self.rounds + 1)) - self.store.numbers(stage.name, cell.name))

    def turns(self, stages: Sequence[Stage] | None = None) -> int:
        """Remaining rounds, counted per engine, of these stages (default: all)."""
        return sum(
            len(self.missing(stage, cell)) * sum(cell.runs(config) for config in stage.configs)
            for stage in (self.stages if stages is None else stages)
            for cell in stage.cells
        )

    def _open(self, stage: Stage) -> list[Cell]:
        return [cell for cell in stage.cells if self.missing(stage, cell)]

    def _left(self) -> float:
        return self.deadline - self.clock()

    def _stage(self, stage: Stage, until: float) -> None:
        began = self.clock()
        with ExitStack() as alive:
            engines: dict[str, Engine] = {}
            for config in stage.configs:
                if self._left() <= 0:
                    return
                self._say(f"{config.name} starts")
                engines[config.name] = self.start(stage, config)
                alive.callback(engines[config.name].close)
            self.starting[stage.name] = self.clock() - began
            seconds: dict[str, float] = {}  # of one round of a cell, once it is warm
            while cells := self._fitting(stage, engines, until, seconds):
                for number in range(1, self.rounds + 1):
                    for cell in cells:
                        if number in self.missing(stage, cell):
                            if self._left() <= 0:
                                return
                            found = self._round(stage, cell, number, engines)
                            self.store.add(Round(stage.name, cell.name, number, found))

    def _fitting(self, stage: Stage, engines: dict[str, Engine], until: float, seconds: dict[str, float]) -> list[Cell]:
        """Open cells whose rounds fit, in order, each after a warm-up; always including a stage's first one."""
        cells: list[Cell] = []
        planned = 0.0
        first = not seconds
        for cell in self._open(stage):
            began = self.clock()
            if cell.name not in seconds:
                if not first and began + planned >= until:
                    break
                self._round(stage, cell, 0, engines)
                seconds[cell.name] = self.clock() - began
            cost = seconds[cell.name] * len(self.missing(stage, cell))
            if first or self.clock() + planned + cost <= until:
                cells.append(cell)
                planned += cost
            first = False
        return cells

    def _round(self, stage: Stage, cell: Cell, number: int, engines: dict[str, Engine]) -> dict[str, Measurement]:
        running = [config for config in stage.configs if cell.runs(config)]
        turn = number % len(running)
        found = {}
        for config in running[turn:] + running[:turn]:
            what = f"round {number}" if number else "warm-up"
            self._say(f"{cell.name}, {what}: {config.name}")
            found[config.name] = engines[config.name].measure(cell, number)
            if number:
                self.progress.update()
        return found

    def _say(self, text: str) -> None:
        self.progress.say(f"{max(0.0, self._left()) / 60:.0f} min at most; {text}")
