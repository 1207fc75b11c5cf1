"""Progress of a run: a bar on a terminal, an occasional line elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm  # type: ignore[import-untyped]

LINE_SECONDS = 30.0


class Progress:
    def __init__(self, *, quiet: bool = False) -> None:
        self.terminal, self.quiet = sys.stderr.isatty(), quiet
        self.bar = tqdm(unit="round", disable=quiet or not self.terminal, dynamic_ncols=True)
        self.total, self.done, self.written = 0, 0, -LINE_SECONDS

    def start(self, total: int) -> None:
        self.total = self.bar.total = total

    def update(self) -> None:
        """Note that one engine has finished a round."""
        self.done += 1
        self.bar.update()

    def say(self, text: str) -> None:
        """Show the next action."""
        self.bar.set_description_str(text)
        if not self.terminal and time.monotonic() - self.written > LINE_SECONDS:
            self.written = time.monotonic()
            self.note(f"{self.done}/{self.total} rounds; {text}")

    def note(self, text: str) -> None:
        """Write a line of progress."""
        if not self.quiet:
            self.write(text)

    def write(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.close()
