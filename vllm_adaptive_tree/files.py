"""Files that are there whole or not at all."""

import os
from pathlib import Path
from uuid import uuid4

UNFINISHED = ".unfinished"


def write_whole(file: Path, data: bytes) -> None:
    """Write beside `file`, then put that in the place of `file` in one step."""
    beside = file.with_name(f".{file.name}.{uuid4().hex}{UNFINISHED}")  # machines that share a disk share process ids
    try:
        with beside.open("xb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
