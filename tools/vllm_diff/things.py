"""Kinds of symbols that a name in a module or class can stand for."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tools.vllm_diff.signature import Function
from tools.vllm_diff.syntax import assigned, is_property, last_names, sets_property


@dataclass(frozen=True, slots=True)
class Module:
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Class:
    module: str
    node: ast.ClassDef


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A function, or a variable with its known attributes."""

    module: str
    function: Function | None = None
    annotation: ast.expr | None = None
    value: ast.expr | None = None
    owner: Class | None = None  # whose attribute it is
    within: Function | None = None  # where it is assigned

    @property
    def is_function(self) -> bool:
        return self.function is not None and not is_property(self.function)


@dataclass(frozen=True, slots=True)
class Missing:
    at: int
    """Index in the path of the first name that does not exist."""


@dataclass(frozen=True, slots=True)
class Unknown:
    at: int
    """Index in the path of the first name whose existence cannot be read off the sources."""


class Outside:
    """Symbol of Python or torch, such as a member of a dict or a tensor."""


Thing = Module | Class | Value
UNKNOWN, OUTSIDE = Unknown(0), Outside()


def defined(module: str, statement: ast.stmt, owner: Class | None = None) -> Iterator[tuple[str, Value | Class]]:
    if isinstance(statement, ast.ClassDef):
        yield statement.name, Class(module, statement)
    elif isinstance(statement, Function):
        if "overload" not in last_names(statement.decorator_list) and not sets_property(statement):
            yield statement.name, Value(module, statement, owner=owner)
    else:
        for target, value, annotation in assigned(statement):
            if isinstance(target, ast.Name):
                yield target.id, Value(module, None, annotation, value, owner)


def says_more(new: Value, old: Value) -> bool:
    if old.function is not None or old.annotation is not None:
        return False
    return new.annotation is not None or (isinstance(old.value, ast.Constant) and new.value is not None)
