"""Training examples on disk, in parts, so that an interrupted run can resume."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from vllm_adaptive_tree.files import TMP_SUFFIX, atomic_write, claim_folder

MANIFEST = "manifest.json"
FORMAT = 2

Progress = Mapping[str, list[int] | None]
"""Number of a started prompt -> its tokens so far; None: finished."""


class Collected(NamedTuple):
    columns: dict[str, Tensor]  # M rows each, "prompt" among them
    trees: int


class Parts:
    """A folder of safetensors files, each written atomically, and the arguments of the run that writes them."""

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def open(cls, folder: Path, arguments: Mapping[str, Any]) -> Self:
        """Open the folder of a new run, or resume one with the same `arguments` (JSON).

        Raises:
            ValueError: the folder belongs to a run with other arguments, or was not written by this program.
        """
        manifest, parts = folder / MANIFEST, cls(folder)
        for file in folder.glob(f".*{TMP_SUFFIX}"):  # left by a run that was killed while writing
            file.unlink()
        claim_folder(manifest, {"format": FORMAT, **arguments}, contents="the examples", replace=not parts.files)
        return parts

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.safetensors"))

    def next_file(self) -> Path:
        number = int(self.files[-1].stem.removeprefix("part-")) + 1 if self.files else 0
        return self.folder / f"part-{number:05}.safetensors"

    def progress(self) -> Progress:
        """Progress as of the last part."""
        return _head(self.files[-1])["progress"] if self.files else {}

    def load(self) -> Collected:
        """All examples.

        Raises:
            ValueError: a part is unreadable, or there is none.
        """
        if not self.files:
            raise ValueError(f"{self.folder} holds no examples: no tree was drafted; give more or longer prompts")
        parts = [_part(file) for file in self.files]
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return Collected(columns, sum(int(_head(file)["trees"]) for file in self.files))


def write_part(file: Path, columns: dict[str, Tensor], *, trees: int, progress: Progress) -> None:
    head = {"head": json.dumps({"trees": trees, "progress": dict(progress)})}
    columns = {name: column.contiguous() for name, column in columns.items()}
    atomic_write(file, save(columns, metadata=head))


def checksum(prompts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16]


def _head(file: Path) -> dict[str, Any]:
    try:
        with safe_open(file, framework="pt") as part:
            return json.loads((part.metadata() or {})["head"])
    except Exception as error:
        raise _unreadable(file, error) from error


def _part(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as part:
            return {name: part.get_tensor(name) for name in part.keys()}  # noqa: SIM118
    except Exception as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} cannot be read ({type(error).__name__}: {error}); delete its folder to begin again")
