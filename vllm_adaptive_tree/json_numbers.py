"""Validated numbers from JSON files; anything unexpected is a ValueError."""

import math
from collections.abc import Iterable
from typing import Any

MAX_NUMBER = 1e9
"""Upper bound of any number of seconds, tokens or observations."""


def number(value: Any, least: float = 0.0, most: float = MAX_NUMBER) -> float:
    """`value` as a float between `least` and `most`; raises ValueError for anything else, NaN and booleans too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is no number between {least:g} and {most:g}")
    return float(value)


def numbers(values: Any, count: int | None, least: float = 0.0, most: float = MAX_NUMBER) -> list[float]:
    """A list of `count` such numbers, or of any count."""
    if not isinstance(values, list) or count not in (None, len(values)):
        raise ValueError("a list of numbers is needed" if count is None else f"{count} numbers are needed")
    return [number(value, least, most) for value in values]


def member(data: Any, key: str) -> Any:
    """`data[key]` of a JSON object; raises ValueError if it is missing."""
    if not isinstance(data, dict) or key not in data:
        raise ValueError(f"{key!r} is missing")
    return data[key]


def short(values: Iterable[float]) -> list[float]:
    """The values rounded to six digits; none is known more precisely."""
    return [float(f"{value:.6g}") if math.isfinite(value) else 0.0 for value in values]
