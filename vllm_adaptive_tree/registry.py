"""Proposers and rules of third parties, by name. What travels to the engine's processes is a path."""

import importlib
from importlib.metadata import entry_points
from typing import Any

GROUPS = {"proposer": "vllm_adaptive_tree.proposers", "acceptance": "vllm_adaptive_tree.acceptance"}
_registered: dict[str, dict[str, str]] = {"proposer": {}, "acceptance": {}}


def register_proposer(name: str, cls_or_path: type | str) -> None:
    """Make `method: name` draft with a `proposers.Proposer`.

    Args:
        name: what users write; no name of a built-in method.
        cls_or_path: an importable class or "pkg.module:Class". It is called with the `tree` options as keywords.

    Raises:
        ValueError: the name is taken, or the class cannot be imported in another process.
    """
    from vllm_adaptive_tree.method_options import OPTIONS

    _register("proposer", name, cls_or_path, taken=tuple(OPTIONS))


def register_acceptance(name: str, cls_or_path: type | str) -> None:
    """Make `rejection_sample_method: name` verify with an `acceptance.Rule`.

    Args:
        name: what users write; no name of a built-in rule, or of one of vLLM's.
        cls_or_path: "pkg.module:RULE", the path of a `Rule`, or a class with its attributes.

    Raises:
        ValueError: the name is taken, or the rule cannot be imported in another process.
    """
    from vllm_adaptive_tree.acceptance import RULES
    from vllm_adaptive_tree.config import VLLM_RULES

    _register("acceptance", name, cls_or_path, taken=("auto", *RULES, *VLLM_RULES))


def path_of(kind: str, name: str) -> str | None:
    """ "pkg.module:Name" of what is registered here or by an installed package, or None."""
    if name in _registered[kind]:
        return _registered[kind][name]
    found = [point.value for point in entry_points(group=GROUPS[kind]) if point.name == name]
    return found[0] if found else None


def names(kind: str) -> tuple[str, ...]:
    return (*_registered[kind], *(point.name for point in entry_points(group=GROUPS[kind])))


def load(path: str) -> Any:
    """Import "pkg.module:Name".

    Raises:
        ValueError: it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path!r} cannot be imported here ({type(error).__name__}: {error})") from error
    return found


def _register(kind: str, name: str, what: Any, taken: tuple[str, ...]) -> None:
    if name in taken:
        raise ValueError(f"register_{kind}: {name!r} is built in; choose another name")
    path = _importable(kind, what)
    if _registered[kind].get(name, path) != path:
        raise ValueError(f"register_{kind}: {name!r} is {_registered[kind][name]!r} already; choose another name")
    load(path)
    _registered[kind][name] = path


def _importable(kind: str, what: Any) -> str:
    path = what
    if not isinstance(what, str):
        path = f"{getattr(what, '__module__', '__main__')}:{getattr(what, '__qualname__', '<object>')}"
    if path.startswith("__main__:") or "<" in path:
        raise ValueError(
            f"register_{kind}: {what!r} cannot be imported in the engine's processes (it is local, a lambda, an "
            'object, or defined in __main__); put it into a module and give "pkg.module:Name"'
        )
    return path
