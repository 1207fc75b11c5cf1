"""The `tree` options of every method: one dataclass each, checked as they are made."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from vllm_adaptive_tree.trees import Shape

SHAPES = ("eagle1", "binary", "ternary")
CHILDREN = {"top_k": "one_hot", "without_replacement": "without_replacement", "iid": "iid"}
"""What users call a kind of children -> the kind."""


def option(default: Any, check: Callable[[Any], bool], what: str) -> Any:
    """A field that must pass `check`; `what` ends the sentence "must be ..."."""
    return field(default=default, metadata={"check": check, "what": what})


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(default: int) -> Any:
    return option(default, lambda value: _is_int(value) and value >= 1, "a whole number of at least 1")


def _flag(default: bool) -> Any:
    return option(default, lambda value: isinstance(value, bool), "true or false")


def _share(default: float) -> Any:
    return option(default, lambda value: _is_number(value) and 0 <= value <= 1, "a number between 0 and 1")


def _file() -> Any:
    return option(None, lambda value: value is None or (isinstance(value, str) and bool(value)), "the path of a file")


def _one_of(default: Any, *names: str) -> Any:
    return option(default, lambda value: value in names, f"one of {', '.join(map(repr, names))}")


def _threshold(default: Any, what: str) -> Any:
    return option(
        default,
        lambda value: value == "auto" or (_is_number(value) and value >= 0),
        f"a number of at least 0 ({what}) or 'auto'",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOptions:
    """Options of all methods."""

    allow_lossy: bool = _flag(default=False)
    """Let a proposer be verified by a rule that changes the target's law."""
    budget: int | str | None = option(
        "auto",
        lambda value: value in (None, "auto") or (_is_int(value) and value >= 1),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OptTreeOptions(MethodOptions):
    max_depth: int = _count(10)
    threshold: float | Literal["auto"] | None = option(
        None,
        lambda value: value in (None, "auto") or (_is_number(value) and value >= 0),
        "a number of at least 0 (tokens gained per level) or 'auto'",
    )
    """Stop when a level adds no more than this to E(A), in tokens; "auto": draft level over target forward; None: what
    pays under `budget` "auto", else 0.5."""
    draft_temperature: float | Literal["auto"] = option(
        "auto", lambda value: value == "auto" or (_is_number(value) and value > 0), "a number above 0 or 'auto'"
    )
    """Temperature of the law that shapes the tree; "auto": for greedy requests fitted under `budget` "auto" and
    else 0.6; for others their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DySpecOptions(MethodOptions):
    mode: str = _one_of("threshold", "threshold", "heap")
    threshold: float | Literal["auto"] = _threshold("auto", "the smallest slot value")
    """Smallest slot value; "auto": moved between steps so that trees fill three quarters of the budget."""
    draft_temperature: float = option(0.6, lambda value: _is_number(value) and value > 0, "a number above 0")
    max_children: int = _count(16)
    max_depth: int = _count(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle2Options(MethodOptions):
    top_k: int = _count(10)
    max_depth: int = _count(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class C2TOptions(MethodOptions):
    beta: float = _share(0.5)
    top_k: int = _count(15)
    entropy_top: int = _count(1000)
    max_depth: int = _count(10)
    second_pruning: bool = _flag(default=True)
    mode: str = _one_of("tree", "tree", "chain")
    gate: str | None = _file()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedOptions(MethodOptions):
    """A method whose shape is fixed and whose children may come about in several ways."""

    children: str | None = option(
        None, lambda value: value is None or value in tuple(CHILDREN), f"one of {', '.join(map(repr, CHILDREN))}"
    )
    """How the children of a node come about; None: as the acceptance rule needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticTreeOptions(ShapedOptions):
    shape: Any = option(
        "eagle1",
        lambda value: value in SHAPES if isinstance(value, str) else _is_shape(value),
        "'eagle1', 'binary', 'ternary', a k-config as [4, 2, 2, 1], or rank paths as [[0], [1], [0, 0]]",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequoiaOptions(ShapedOptions):
    vector: str | None = _file()
    """JSON file {"vector": [P(first child accepted), P(second), ..]}."""
    max_depth: int = _count(10)


@dataclass(frozen=True, slots=True, kw_only=True)
class McsdOptions(ShapedOptions):
    shape: Any = option((4, 2, 2, 1), lambda value: _is_k_config(value), "a k-config as [4, 2, 2, 1]")
    init_width: int = _count(1)
    stop: str = _one_of("none", "none", "type1", "type2")
    stop_threshold: float = _share(0.4)
    gate: str | None = _file()

    def __post_init__(self) -> None:
        super(McsdOptions, self).__post_init__()
        if self.init_width > 1 and not self.allow_lossy:
            raise ValueError(
                f"speculative_config['tree']['init_width']={self.init_width} changes what the target says, greedy text "
                "too; use init_width 1, or set tree: {'allow_lossy': true}"
            )


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _is_k_config(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(_is_int(k) and k >= 1 for k in value)


def _is_shape(value: Any) -> bool:
    if _is_k_config(value):
        return True
    rows = isinstance(value, list | tuple) and bool(value) and all(isinstance(path, list | tuple) for path in value)
    if not rows or not all(_is_int(rank) and rank >= 0 for path in value for rank in path):
        return False
    Shape.of(value)  # says itself what is wrong with it
    return True


OPTIONS: Mapping[str, type[MethodOptions]] = {
    "opt_tree": OptTreeOptions,
    "dyspec": DySpecOptions,
    "c2t": C2TOptions,
    "eagle2": Eagle2Options,
    "static_tree": StaticTreeOptions,
    "sequoia": SequoiaOptions,
    "mcsd": McsdOptions,
}


def shipped(tree: MethodOptions) -> Path | None:
    """The bundled pair's gate or vector, where `tree` asks for one and names none."""
    folder = Path(__file__).parent / "gates" / "defaults"
    match tree:
        case C2TOptions(gate=None):
            return folder / "c2t.safetensors"
        case SequoiaOptions(vector=None):
            return folder / "sequoia.json"
        case McsdOptions(gate=None, stop="type1" | "type2"):
            return folder / f"mcsd-{tree.stop}.safetensors"
        case _:
            return None


def readable(file: str | Path, key: str) -> Path:
    """The file behind an option, or an error that names the option."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"speculative_config['tree'][{key!r}]: there is no file {file!r}")
    return path
