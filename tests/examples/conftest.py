"""Engines as in `tests/engine`; and the folder of the 70B recipes, whose scripts import each other."""

import sys
from pathlib import Path

from tests.engine.conftest import engines

__all__ = ["engines"]

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "70b"))
