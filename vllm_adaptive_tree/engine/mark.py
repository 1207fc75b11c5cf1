"""What marks a SpeculativeConfig as that of a tree method, in every process that it reaches."""

from dataclasses import dataclass
from typing import Any

from vllm_adaptive_tree.engine import patches


@dataclass(frozen=True)
class Mark:
    """Unpickled or copied, it first installs what its process needs: a front end may be given a finished configuration
    and never load a plugin. Without this package, unpickling says so (ModuleNotFoundError)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return installed, ()


def installed() -> Mark:
    patches.install()
    return Mark()
