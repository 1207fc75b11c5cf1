"""Atomic file writes."""

import os
from pathlib import Path
from uuid import uuid4

TMP_SUFFIX = ".unfinished"


def atomic_write(file: Path, data: bytes) -> None:
    """Write to a temporary file in the same folder, fsync, and rename: readers see the old content or the new."""
    temporary = file.with_name(f".{file.name}.{uuid4().hex}{TMP_SUFFIX}")  # hosts that share a disk share process ids
    try:
        with temporary.open("xb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
