"""A torchvision that has nothing: vLLM imports it for a class that may read images, and none are read here."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

PACKAGE = """
import sys
from unittest.mock import MagicMock

for part in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{part}"] = MagicMock(__path__=[], __spec__=None)
__version__ = "0.28.0"
"""


@contextmanager
def imported(folder: Path) -> Iterator[None]:
    """Where no torchvision is installed, make it importable from `folder`, here and where vLLM looks at its classes."""
    if find_spec("torchvision") is not None:
        yield
        return
    package = folder / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    before = os.environ.get("PYTHONPATH")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
