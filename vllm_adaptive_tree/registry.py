"""Registry: proposers, acceptance rules and drafters by name, built-in and third-party."""

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

T = TypeVar("T")

REGISTRIES: "list[Registry[Any]]" = []
"""All registries; importing a base class makes that of its subclasses."""


class Registry(Mapping[str, T]):
    """Subclasses of one base class by name.

    A name maps to an import path "pkg.module:Name", which the engine's processes receive. Built-in names come first,
    then those registered in this process, then entry points of installed packages.
    """

    def __init__(
        self, noun: str, base: type | str, built_in: Mapping[str, str], *, group: str, reserved: tuple[str, ...] = ()
    ):
        """
        Args:
            noun: of one class, in messages.
            base: the base class, whose `required` attributes a class must have; or its import path, if it is to be
                loaded only where it is needed.
            built_in: name -> path.
            group: entry point group by which installed packages register.
            reserved: other names that cannot be registered.
        """
        self.noun, self.given, self.built_in, self.group, self.reserved = noun, base, dict(built_in), group, reserved
        self.registered: dict[str, str] = {}
        REGISTRIES.append(self)

    @property
    def base(self) -> type:
        """Base class of all."""
        base: type = imported(self.given) if isinstance(self.given, str) else self.given
        return base

    @property
    def paths(self) -> dict[str, str]:
        """Name -> import path."""
        return self.built_in | installed(self.group) | self.registered | self.built_in

    def __getitem__(self, name: str) -> T:
        return self.load(self.paths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.paths

    def load(self, path: str) -> T:
        """Import "pkg.module:Name".

        Raises:
            ValueError: it cannot be imported, or is not of this registry.
        """
        value = imported(path)
        if not _is_subclass(value, self.base):
            module = self.base.__module__.rpartition(".")[0]
            raise ValueError(f"{path!r} is no {self.noun}: derive it from {module}.{self.base.__name__}")
        required = [name for name in getattr(self.base, "required", ()) if not hasattr(value, name)]
        if missing := required or sorted(getattr(value, "__abstractmethods__", ())):
            raise ValueError(f"{path!r} is no {self.noun} yet: it does not define {', '.join(missing)}")
        loaded: T = value
        return loaded


def register(name: str, cls_or_path: type | str) -> None:
    """Register a `Proposer`, a `Rule`, a `TextDrafter` or a `DraftKind` under the name that users write.

    Args:
        name: what users write into `method`, `rejection_sample_method` or `model`; no built-in name.
        cls_or_path: an importable class, or "pkg.module:Class".

    Raises:
        ValueError: the name is taken, or the class cannot be imported in another process or derives from none of them.
    """
    path = _importable(cls_or_path)
    value = imported(path)
    registry = next((registry for registry in _loaded_first() if _is_subclass(value, registry.base)), None)
    if registry is None:
        raise ValueError(
            f"register: derive {path!r} from vllm_adaptive_tree's Proposer, Rule, TextDrafter or DraftKind"
        )
    registry.load(path)
    if name in (*registry.built_in, *registry.reserved):
        raise ValueError(f"register: {name!r} is built in; choose another name for this {registry.noun}")
    taken = registry.registered.setdefault(name, path)
    if taken != path:
        raise ValueError(f"register: {name!r} is {taken!r} already; choose another name for this {registry.noun}")


@cache
def installed(group: str) -> dict[str, str]:
    """Entry points of a group, name -> import path; read once, since it takes 80 ms."""
    return {point.name: point.value for point in entry_points(group=group)}


def imported(path: str) -> Any:
    """Object at "pkg.module:Name".

    Raises:
        ValueError: it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path!r} cannot be imported here ({type(error).__name__}: {error})") from error
    return value


def _importable(cls_or_path: Any) -> str:
    path = cls_or_path
    if not isinstance(path, str):
        path = f"{getattr(path, '__module__', '__main__')}:{getattr(path, '__qualname__', '<object>')}"
    if path.startswith("__main__:") or "<" in path:
        raise ValueError(
            f"register: {cls_or_path!r} cannot be imported in the engine's processes (it is local, a lambda, "
            'an object, or defined in __main__); put it into a module and give "pkg.module:Name"'
        )
    return path


def _loaded_first() -> "list[Registry[Any]]":
    return sorted(REGISTRIES, key=lambda registry: isinstance(registry.given, str))


def _is_subclass(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)
