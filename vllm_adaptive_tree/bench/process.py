"""Engine in a process of its own, idle between rounds; the engine ends with the process."""

import contextlib
import os
import sys
import traceback
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_adaptive_tree.bench.offline import Offline, Setup
from vllm_adaptive_tree.bench.plan import Cell, Config
from vllm_adaptive_tree.bench.rounds import Measurement

STOP_SECONDS = 20.0


class EngineProcess:
    """A process with an engine of class `kind`. Its output goes to `log`; without one, to this process's output.

    Raises RuntimeError if the engine fails to start or ends.
    """

    def __init__(self, config: Config, setup: Setup, log: Path | None, kind: type[Offline] = Offline):
        context = get_context("spawn")
        self.name, self.log = config.name, log
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, config, setup, log, kind), daemon=True)
        self.process.start()
        theirs.close()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def measure(self, cell: Cell, number: int) -> Measurement:
        found = self.call("measure", cell, number)
        assert isinstance(found, Measurement)
        return found

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine and return its result."""
        self.connection.send((method, arguments))
        return self._answer()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(STOP_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()

    def _answer(self) -> Any:
        where = f"; see {self.log}" if self.log else ""
        try:
            failed, value = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join(STOP_SECONDS)
            reason = f"its process ended with code {self.process.exitcode}"
            raise RuntimeError(f"the engine of {self.name!r} is gone: {reason}{where}") from error
        if failed:
            raise RuntimeError(f"the engine of {self.name!r} failed: {value}{where}")
        return value


def _serve(connection: Connection, config: Config, setup: Setup, log: Path | None, kind: type[Offline]) -> None:
    """Answer calls in the process, until told to stop, or until the parent is gone."""
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
    try:
        engine = kind(config, setup)
        connection.send((False, None))
        with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
            while (command := connection.recv()) is not None:
                method, arguments = command
                connection.send((False, getattr(engine, method)(*arguments)))
        engine.engine.engine_core.shutdown()
    except Exception as error:
        traceback.print_exc()
        connection.send((True, f"{type(error).__name__}: {error}"[:2000]))
