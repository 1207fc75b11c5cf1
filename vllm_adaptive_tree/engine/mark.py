"""The mark on the SpeculativeConfig of a tree method, which works in every process that it reaches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_adaptive_tree.engine import installation, patches


@dataclass(frozen=True)
class Mark:
    """Mark that acts when it is copied or unpickled: it compares the installed packages with those where it was
    pickled, and installs our patches. A front end may be given a finished configuration and never load a plugin."""

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (installation.here(),)


def arrive(wanted: Mapping[str, str]) -> Mark:
    """The mark in another process. `wanted`: the installation that it comes from.

    Raises:
        RuntimeError: other versions are installed here; names the node and the remedy.
    """
    installation.check(wanted)
    return installed()


def installed() -> Mark:
    patches.install()
    return Mark()
