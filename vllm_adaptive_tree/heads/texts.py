"""Texts to train on: files by glob, one in 32 held out by its name."""

import zlib
from collections.abc import Sequence
from glob import glob
from pathlib import Path

HELD_OUT = 32


def is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % HELD_OUT == 0


def read(patterns: Sequence[str]) -> list[tuple[str, str]]:
    """Names and texts of the files that match; `**` matches any folders. A name is the path below the first wildcard;
    files of two folders may have the same.

    Raises:
        ValueError: a pattern matches no file.
    """
    texts = dict[Path, tuple[str, str]]()
    for pattern in patterns:
        parts = Path(pattern).parts
        fixed = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), len(parts) - 1)
        root = Path(*parts[:fixed])
        files = [Path(file) for file in sorted(glob(pattern, recursive=True)) if Path(file).is_file()]
        if not files:
            raise ValueError(f"no file matches {pattern}")
        for file in files:
            text = file.read_text(encoding="utf-8", errors="ignore")
            texts.setdefault(file.resolve(), (file.relative_to(root).as_posix(), text))
    return list(texts.values())
