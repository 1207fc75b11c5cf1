"""One registry for methods and rules by name, built-in and third-party."""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@cache
def installed(group: str) -> Mapping[str, str]:
    """The entry points of a group, name -> import path; read once, since it takes 80 ms."""
    return {point.name: point.value for point in entry_points(group=group)}


class Registry(Generic[T]):
    """Objects of one sort by name.

    A name maps to an import path "pkg.module:Name", which is what the engine's processes receive. Built-in names come
    first, then those registered in this process, then entry points of installed packages.
    """

    def __init__(
        self,
        sort: str,
        built_in: Mapping[str, str],
        *,
        group: str,
        lacks: Callable[[Any], str | None],
        reserved: tuple[str, ...] = (),
    ):
        """
        Args:
            sort: "proposer", of `register_proposer`; for messages.
            built_in: name -> path.
            group: entry point group by which installed packages register.
            lacks: says what an object lacks to be of this sort; None: nothing.
            reserved: other names that cannot be registered.
        """
        self.sort, self.built_in, self.group, self.lacks, self.reserved = sort, built_in, group, lacks, reserved
        self.registered: dict[str, str] = {}

    def register(self, name: str, what: Any) -> None:
        """`what`: an importable object, or its path.

        Raises:
            ValueError: the name is taken, or `what` cannot be imported in another process or is not of this sort.
        """
        if name in (*self.built_in, *self.reserved):
            raise ValueError(f"register_{self.sort}: {name!r} is built in; choose another name")
        path = self._importable(what)
        if self.registered.get(name, path) != path:
            raise ValueError(
                f"register_{self.sort}: {name!r} is {self.registered[name]!r} already; choose another name"
            )
        self.load(path)
        self.registered[name] = path

    def names(self) -> tuple[str, ...]:
        return (*self.built_in, *self.registered, *installed(self.group))

    def path(self, name: str) -> str | None:
        """The import path of a name; None if it is unknown."""
        return {**installed(self.group), **self.registered, **self.built_in}.get(name)

    def load(self, path: str) -> T:
        """Import "pkg.module:Name".

        Raises:
            ValueError: it cannot be imported, or is not of this sort.
        """
        found = imported(path)
        if lack := self.lacks(found):
            raise ValueError(f"{path!r} is no {self.sort}: {lack}")
        one: T = found
        return one

    def _importable(self, what: Any) -> str:
        path = what
        if not isinstance(what, str):
            path = f"{getattr(what, '__module__', '__main__')}:{getattr(what, '__qualname__', '<object>')}"
        if path.startswith("__main__:") or "<" in path:
            raise ValueError(
                f"register_{self.sort}: {what!r} cannot be imported in the engine's processes (it is local, a lambda, "
                'an object, or defined in __main__); put it into a module and give "pkg.module:Name"'
            )
        return path


def imported(path: str) -> Any:
    """The object at "pkg.module:Name".

    Raises:
        ValueError: it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path!r} cannot be imported here ({type(error).__name__}: {error})") from error
    return found
