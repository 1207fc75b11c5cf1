"""Validated options: a frozen dataclass whose fields check what users write into `tree`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any


def option(default: Any, check: Callable[[Any], bool], what: str) -> Any:
    """A field validated by `check`; `what` completes the error message "must be ..."."""
    return field(default=default, metadata={"check": check, "what": what})


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def count(default: int) -> Any:
    return option(default, lambda value: is_int(value) and value >= 1, "a whole number of at least 1")


def flag(default: bool) -> Any:
    return option(default, lambda value: isinstance(value, bool), "true or false")


def fraction(default: float) -> Any:
    return option(default, lambda value: is_number(value) and 0 <= value <= 1, "a number between 0 and 1")


def file() -> Any:
    return option(None, lambda value: value is None or (isinstance(value, str) and bool(value)), "the path of a file")


def one_of(default: Any, *names: str) -> Any:
    return option(default, lambda value: value in names, f"one of {', '.join(map(repr, names))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of all options. Lists become tuples: JSON gives lists, and both must compare equal."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if "check" in one.metadata and not one.metadata["check"](value):
                raise ValueError(
                    f"speculative_config['tree'][{one.name!r}] must be {one.metadata['what']}, got {value!r}"
                )
            object.__setattr__(self, one.name, _as_tuples(value))


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
