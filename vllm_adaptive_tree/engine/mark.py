"""The mark on the SpeculativeConfig of a tree method, which works in every process that it reaches."""

import inspect
from dataclasses import dataclass
from typing import Any

from vllm_adaptive_tree.engine import installation, patches

ARRIVE = "exec(source, space) or space['arrive'](wanted)"
"""`installation.arrive(wanted)`, from the text of that file."""


@dataclass(frozen=True)
class Mark:
    """Unpickled or copied, it compares what is installed with what was installed where it was pickled, and installs our
    patches: a front end may be given a finished configuration and never load a plugin.

    Raises:
        RuntimeError: unpickled on a node without this package, or with other versions; names the node.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        text = inspect.getsource(installation)  # by name, a node without this package would raise an ImportError
        return eval, (ARRIVE, {"source": text, "space": {}, "wanted": installation.here()})


def installed() -> Mark:
    patches.install()
    return Mark()
