"""The checks of `tree` options, and the options of all methods; each method's own stand beside its algorithm."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

GREEDY_DRAFT_TEMPERATURE = 0.6
"""Of the law that shapes the trees of greedy requests with `draft_temperature: "auto"`, where no budget fits it: raw
probabilities undervalue the best token of a greedy target."""


class Steered(NamedTuple):
    """Which attributes of a proposer the engine sets by what it measures, on every model runner; all else is as the
    user wrote it."""

    measured: bool = False
    """`threshold`: once, by what a draft level costs in target forwards."""
    price: bool = False
    """`threshold` and `floor`: in every step, by what the budget's time is worth."""
    fill: bool = False
    """`steer`: between steps, so that trees fill their share of the node budget."""
    temperature: bool = False
    """The draft temperature of greedy requests: between steps, by what the target takes."""


def option(default: Any, check: Callable[[Any], bool], what: str) -> Any:
    """A field that must pass `check`; `what` ends the sentence "must be ..."."""
    return field(default=default, metadata={"check": check, "what": what})


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def count(default: int) -> Any:
    return option(default, lambda value: is_int(value) and value >= 1, "a whole number of at least 1")


def flag(default: bool) -> Any:
    return option(default, lambda value: isinstance(value, bool), "true or false")


def share(default: float) -> Any:
    return option(default, lambda value: is_number(value) and 0 <= value <= 1, "a number between 0 and 1")


def file() -> Any:
    return option(None, lambda value: value is None or (isinstance(value, str) and bool(value)), "the path of a file")


def one_of(default: Any, *names: str) -> Any:
    return option(default, lambda value: value in names, f"one of {', '.join(map(repr, names))}")


def threshold(default: Any, what: str, *, none: bool = False) -> Any:
    """`none`: None is a value too."""
    return option(
        default,
        lambda value: value == "auto" or (none and value is None) or (is_number(value) and value >= 0),
        f"a number of at least 0 ({what}) or 'auto'",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOptions:
    """Options of all methods."""

    allow_lossy: bool = flag(default=False)
    """Let a proposer be verified by a rule that changes the target's distribution."""
    budget: int | str | None = option(
        "auto",
        lambda value: value in (None, "auto") or (is_int(value) and value >= 1),
        "'auto' or a whole number of at least 1",
    )
    """Nodes of the whole batch in a step; "auto": as many as pay by measured cost; None: all of every tree."""
    cost_profile: str | None = option(
        "auto",
        lambda value: value is None or (isinstance(value, str) and bool(value)),
        "the path of a file, 'auto' or null",
    )
    """JSON file of what `budget` "auto" has measured and learnt, from process to process; "auto": one in vLLM's cache
    folder for each pair, machine and method; None: nothing is kept."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if "check" in one.metadata and not one.metadata["check"](value):
                raise ValueError(
                    f"speculative_config['tree'][{one.name!r}] must be {one.metadata['what']}, got {value!r}"
                )
            object.__setattr__(self, one.name, _as_tuples(value))  # JSON gives lists; both shall be the same options
        if self.cost_profile not in (None, "auto") and self.budget != "auto":
            raise ValueError(
                f"speculative_config['tree']['cost_profile'] is read and written with budget 'auto' only, got "
                f"{self.budget!r}; remove one of them"
            )

    @property
    def steered(self) -> Steered:
        return Steered()

    def temperature(self, own: float, fitted: float = GREEDY_DRAFT_TEMPERATURE) -> float:
        """Of the law that shapes or draws the tree of a request whose own temperature this is; 0 is greedy. `fitted`:
        what serves greedy requests best, as far as the engine knows. Sampled children come closest at the request's."""
        return own if own > 0 else 1.0

    def shipped(self) -> Path | None:
        """The bundled pair's gate or vector, where these options ask for one and name none."""
        return None


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def readable(file: str | Path | None, key: str) -> Path:
    """The file behind an option, or an error that names the option; a bundled one stands in where none is named."""
    assert file is not None
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"speculative_config['tree'][{key!r}]: there is no file {file!r}")
    return path


def bundled(name: str) -> Path:
    """A file that was learnt from the bundled pair."""
    return Path(__file__).parent / "defaults" / name
