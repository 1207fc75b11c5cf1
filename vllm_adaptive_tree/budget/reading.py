"""Numbers from a file that anybody may have written: what does not fit is a ValueError."""

import math
from collections.abc import Iterable
from typing import Any

MOST = 1e9
"""No second, token or observation comes to more."""


def number(value: Any, least: float = 0.0, most: float = MOST) -> float:
    """`value` as a float between `least` and `most`; raises ValueError for anything else, NaN and booleans too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is no number between {least:g} and {most:g}")
    return float(value)


def numbers(values: Any, count: int, least: float = 0.0, most: float = MOST) -> list[float]:
    """A list of `count` of them."""
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{count} numbers are needed")
    return [number(value, least, most) for value in values]


def member(data: Any, key: str) -> Any:
    """`data[key]` of a JSON object; raises ValueError where there is none."""
    if not isinstance(data, dict) or key not in data:
        raise ValueError(f"{key!r} is missing")
    return data[key]


def short(values: Iterable[float]) -> list[float]:
    """Six digits of each, which is more than any of them is known to."""
    return [float(f"{value:.6g}") if math.isfinite(value) else 0.0 for value in values]
