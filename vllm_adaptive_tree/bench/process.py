"""An engine in a process of its own, which takes the engine with it when it ends and sleeps between rounds."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.bench.offline import Offline, Setup
from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.rounds import Measurement

STOP_SECONDS = 20.0


class EngineProcess:
    """Raises RuntimeError where the engine does not start, or ends; what it printed is in `log`."""

    def __init__(self, config: Config, setup: Setup, log: Path):
        context = get_context("spawn")
        self.name, self.log = config.name, log
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, config, setup, log), daemon=True)
        self.process.start()
        theirs.close()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def measure(self, cell: Cell, number: int) -> Measurement:
        self.connection.send((cell, number))
        found = self._answer()
        assert isinstance(found, Measurement)
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(STOP_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()

    def _answer(self) -> Any:
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join(STOP_SECONDS)
            reason = f"its process ended with code {self.process.exitcode}"
            raise RuntimeError(f"the engine of {self.name!r} is gone: {reason}; see {self.log}") from error
        if kind == "error":
            raise RuntimeError(f"the engine of {self.name!r} failed: {value}; see {self.log}")
        return value


def _serve(connection: Connection, config: Config, setup: Setup, log: Path) -> None:
    """In the process: rounds until told to stop, or until the parent is gone."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    engine = _try(connection, lambda: Offline(config, setup))
    if engine is None:
        return
    connection.send(("ready", None))
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while (command := connection.recv()) is not None:
            cell, number = command
            found = _try(connection, lambda cell=cell, number=number: engine.measure(cell, number))  # type: ignore[misc]
            if found is None:
                return
            connection.send(("measured", found))
    engine.engine.engine_core.shutdown()


def _try(connection: Connection, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        connection.send(("error", f"{type(error).__name__}: {error}"[:2000]))
        return None
