"""Atomic file writes, folders that belong to one run, the cache folder."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

TMP_SUFFIX = ".unfinished"


def cache_folder() -> Path:
    """This project's folder in the user's cache; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_adaptive_tree"


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


def claim_folder(manifest: Path, settings: Mapping[str, Any], *, contents: str, replace: bool = False) -> None:
    """Create the folder of `manifest` for a new run, or check that an earlier run with the same `settings` (JSON) did.
    `replace`: that run has no results, so any settings may follow.

    Raises:
        ValueError: the folder holds `contents` of a run with other settings, or was not written by this program.
        OSError: it cannot be read or written.
    """
    folder = manifest.parent
    wanted = json.loads(json.dumps(settings))
    if manifest.exists() and not replace:
        try:
            there = json.loads(manifest.read_text())
            assert isinstance(there, dict)
        except (ValueError, AssertionError) as error:
            raise ValueError(f"{manifest} cannot be read ({error}); delete its folder to begin again") from error
        differing = sorted(key for key in wanted.keys() | there.keys() if wanted.get(key) != there.get(key))
        if differing:
            changes = "; ".join(f"{key}: {there.get(key)!r} there, {wanted.get(key)!r} now" for key in differing)
            raise ValueError(
                f"{folder} holds {contents} of another run ({changes}); give the same arguments to go on there, "
                "another --out, or delete that folder"
            )
    elif not manifest.exists() and folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} is not empty and holds no {manifest.name}; give another --out or delete that folder"
        )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(manifest, (json.dumps(wanted, indent=2) + "\n").encode())
