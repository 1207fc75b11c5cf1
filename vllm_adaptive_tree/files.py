"""Files that are there whole or not at all."""

import os
from pathlib import Path

UNFINISHED = ".unfinished"


def write_whole(file: Path, data: bytes) -> None:
    """Write beside `file`, then put that in the place of `file` in one step."""
    beside = file.with_name(f".{file.name}.{os.getpid()}{UNFINISHED}")
    try:
        with beside.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
