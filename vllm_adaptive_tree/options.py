"""Validated options: a frozen dataclass whose fields check what users write into `tree`."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

MOST = (1 << 31) - 1
COUNT = "a whole number of at least 1, and of at most 2**31 - 1"


def option(default: Any, check: Callable[[Any], bool], requirement: str) -> Any:
    """Field validated by `check`; `requirement` completes the error message "must be ..."."""
    return field(default=default, metadata={"check": check, "requirement": requirement})


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any, least: float, most: float) -> bool:
    """Return whether `value` is a number within the bounds, also a whole number that no float holds; NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def is_count(value: Any) -> bool:
    return is_int(value) and 1 <= value <= MOST


def count(default: int) -> Any:
    return option(default, is_count, COUNT)


def number(default: Any, least: float, most: float, *others: str | None, what: str = "") -> Any:
    """Field for a number within bounds that keep tensors finite, or one of `others`; `what`: its meaning in errors."""
    names = [f" or {'null' if other is None else repr(other)}" for other in others]
    return option(
        default,
        lambda value: is_number(value, least, most) or (isinstance(value, str | None) and value in others),
        f"a number between {least:g} and {most:g}{what and f' ({what})'}{''.join(names)}",
    )


def flag(default: bool) -> Any:
    return option(default, lambda value: isinstance(value, bool), "true or false")


def fraction(default: float) -> Any:
    return number(default, 0, 1)


def file() -> Any:
    return option(None, lambda value: value is None or (isinstance(value, str) and bool(value)), "the path of a file")


def one_of(default: Any, *names: str) -> Any:
    return option(default, lambda value: value in names, f"one of {', '.join(map(repr, names))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base of all options. Lists become tuples: JSON gives lists, and both must compare equal."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if "check" in item.metadata and not item.metadata["check"](value):
                raise ValueError(
                    f"speculative_config['tree'][{item.name!r}] must be {item.metadata['requirement']}, got {value!r}"
                )
            object.__setattr__(self, item.name, _as_tuples(value))


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
