"""Resolution of paths such as `vllm.x.Class().attribute` in a release, by reading its sources.

A path is a tuple of names; "()" stands for a call. Re-exports, base classes and the types of attributes are followed:
annotations, constructors, and parameters that are kept as they came.
"""

import ast
import builtins
from collections.abc import Iterator

from tools.vllm_diff.signature import Function, Signature
from tools.vllm_diff.sources import ROOT, Sources
from tools.vllm_diff.syntax import kept, last_names, mentions, sides, statements
from tools.vllm_diff.things import (
    OUTSIDE,
    UNKNOWN,
    Class,
    Missing,
    Module,
    Outside,
    Thing,
    Unknown,
    Value,
    defined,
    says_more,
)

Trail = tuple[str, ...]
CALL = "()"
WRAPPERS = ("Annotated", "ClassVar", "Final", "Optional", "SkipValidation", "type")
RECORDS = ("dataclass", "config", "NamedTuple", "Struct", "BaseModel")
"""Decorators and bases whose annotated fields are the parameters of the constructor."""


class Symbols:
    def __init__(self, sources: Sources):
        self.sources = sources
        self._globals: dict[str, dict[str, Value | Class | Trail]] = {}
        self._members: dict[ast.ClassDef, dict[str, Value | Class]] = {}
        self._open: set[int] = set()  # expressions whose type is being looked for

    def find(self, path: Trail) -> Thing | Missing | Unknown | Outside:
        thing: Thing | Unknown | Outside | None = Module(path[0])
        for at, name in enumerate(path[1:], start=1):
            assert isinstance(thing, Module | Class | Value)
            thing = self._step(thing, name)
            if thing is None:
                return Missing(at)
            if isinstance(thing, Unknown | Outside):
                return Unknown(at) if isinstance(thing, Unknown) else thing
        assert thing is not None
        return thing

    def depth(self, path: Trail) -> int:
        """Number of the first names that are modules."""
        found = (at for at in range(1, len(path) + 1) if not isinstance(self.find(path[:at]), Module))
        return next(found, len(path) + 1) - 1

    def signature(self, path: Trail) -> Signature | None:
        """Signature of a function, or of a class's constructor; None if the path leads to neither."""
        thing = self.find(path)
        if isinstance(thing, Class):
            found = self._member(thing, "__init__")
            if isinstance(found, Value) and found.function is not None:
                return Signature.of(found.function, bound=True)
            return self._fields(thing)
        if not isinstance(thing, Value) or thing.function is None or not thing.is_function:
            return None
        decorators = last_names(thing.function.decorator_list)
        instance = not isinstance(self.find(path[:-1]), Class) or path[-2] == CALL or "classmethod" in decorators
        return Signature.of(
            thing.function, bound=thing.owner is not None and instance and "staticmethod" not in decorators
        )

    # -- one name further

    def _step(self, thing: Thing, name: str) -> Thing | Unknown | Outside | None:
        if isinstance(thing, Module):
            return self._global(thing.name, name)
        if name == CALL:
            if isinstance(thing, Class):
                return thing
            return (self._returned(thing) if thing.is_function else None) or _beyond(thing)
        owner = thing if isinstance(thing, Class) else self._type(thing)
        if owner is None:
            assert isinstance(thing, Value)
            return _beyond(thing)
        return self._member(owner, name)

    def _global(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> Thing | Unknown | Outside | None:
        if module not in self.sources:
            return UNKNOWN
        bindings = self._bindings(module)
        found = bindings.get(name)
        if isinstance(found, Class | Value):
            return found
        if isinstance(found, tuple):
            return self._imported(found, seen | {f"{module}:{name}"})
        if f"{module}.{name}" in self.sources:
            return Module(f"{module}.{name}")
        for star in (key for key in bindings if key.startswith("*")):
            target = bindings[star]
            assert isinstance(target, tuple)
            if target[0] == ROOT and star not in seen:
                inside = self._global(".".join(target), name, seen | {star})
                if inside is not None and not isinstance(inside, Unknown):
                    return inside
        if "__getattr__" in bindings and mentions(self.sources.tree(module), name):
            return UNKNOWN
        return None

    def _imported(self, target: Trail, seen: frozenset[str]) -> Thing | Unknown | Outside | None:
        if target[0] != ROOT:
            return UNKNOWN
        if ".".join(target) in self.sources:
            return Module(".".join(target))
        module, name = ".".join(target[:-1]), target[-1]
        if f"{module}:{name}" in seen:
            return None
        return self._global(module, name, seen)

    def _bindings(self, module: str) -> dict[str, Value | Class | Trail]:
        if module not in self._globals:
            found: dict[str, Value | Class | Trail] = {}
            for statement in statements(self.sources.tree(module).body):
                if isinstance(statement, ast.ImportFrom):
                    source = self._source(module, statement)
                    for alias in statement.names:
                        if alias.name == "*":
                            found["*" + ".".join(source)] = source
                        else:
                            found.setdefault(alias.asname or alias.name, (*source, alias.name))
                elif isinstance(statement, ast.Import):
                    for alias in statement.names:
                        full = tuple(alias.name.split("."))
                        found.setdefault(alias.asname or full[0], full if alias.asname else full[:1])
                else:
                    for name, thing in defined(module, statement):
                        if isinstance(thing, Class) or thing.function is not None or name not in found:
                            found[name] = thing
            self._globals[module] = found
        return self._globals[module]

    def _source(self, module: str, statement: ast.ImportFrom) -> Trail:
        names = tuple(statement.module.split(".")) if statement.module else ()
        if not statement.level:
            return names
        parts = tuple(module.split("."))
        up = statement.level - self.sources.is_package(module)
        return parts[: len(parts) - up] + names

    # -- classes

    def _lineage(self, owner: Class, seen: frozenset[ast.ClassDef] = frozenset()) -> Iterator[Class]:
        """Class and its bases in vLLM, depth first."""
        yield owner
        for base in owner.node.bases:
            found = self._evaluated(base.value if isinstance(base, ast.Subscript) else base, owner.module)
            if isinstance(found, Class) and found.node not in seen:
                yield from self._lineage(found, seen | {owner.node})

    def _member(self, owner: Class, name: str) -> Value | Class | None:
        for one in self._lineage(owner):
            found = self._own_members(one).get(name)
            if found is not None:
                return found
        return None

    def _own_members(self, owner: Class) -> dict[str, Value | Class]:
        if owner.node in self._members:
            return self._members[owner.node]
        found: dict[str, Value | Class] = {}

        def add(name: str, new: Value | Class) -> None:
            old = found.get(name)
            if old is None or (isinstance(old, Value) and isinstance(new, Value) and says_more(new, old)):
                found[name] = new

        for statement in statements(owner.node.body):
            for name, thing in defined(owner.module, statement, owner):
                add(name, thing)
        for method in (statement for statement in statements(owner.node.body) if isinstance(statement, Function)):
            for name, value, annotation in kept(method):
                add(name, Value(owner.module, None, annotation, value, owner, method))
        self._members[owner.node] = found
        return found

    def _fields(self, owner: Class) -> Signature | None:
        lineage = list(self._lineage(owner))
        marks = {name for one in lineage for name in last_names([*one.node.decorator_list, *one.node.bases])}
        if not marks & set(RECORDS):
            return None
        defaults: dict[str, ast.expr | None] = {}
        for one in reversed(lineage):
            for field in one.node.body:
                match field:
                    case ast.AnnAssign(target=ast.Name(id=name)) if "ClassVar" not in last_names([field.annotation]):
                        defaults[name] = field.value
        required = frozenset(name for name, value in defaults.items() if value is None)
        return Signature(tuple(defaults), (), required, False, False)

    # -- types

    def _type(self, thing: Value) -> Class | None:
        """Class of the value, if only one is possible."""
        if thing.function is not None:
            return None if thing.is_function else self._returned(thing)
        if thing.annotation is not None:
            return self._annotated(thing.annotation, thing.module)
        if thing.value is None or id(thing.value) in self._open:
            return None
        self._open.add(id(thing.value))
        try:
            found = self._evaluated(thing.value, thing.module, thing.owner, thing.within)
            if isinstance(found, Value):
                return self._type(found)
            return found if isinstance(found, Class) else None
        finally:
            self._open.discard(id(thing.value))

    def _returned(self, thing: Value) -> Class | None:
        assert thing.function is not None
        returns = thing.function.returns
        if thing.owner is not None and returns is not None and last_names([returns]) == ["Self"]:
            return thing.owner
        return None if returns is None else self._annotated(returns, thing.module)

    def _annotated(self, annotation: ast.expr, module: str) -> Class | None:
        match annotation:
            case ast.Constant(value=str(text)):
                try:
                    return self._annotated(ast.parse(text, mode="eval").body, module)
                except SyntaxError:
                    return None
            case ast.BinOp(op=ast.BitOr()):
                kinds = [side for side in sides(annotation) if not isinstance(side, ast.Constant) or side.value]
                return self._annotated(kinds[0], module) if len(kinds) == 1 else None
            case ast.Subscript():
                wrapped = annotation.slice.elts[0] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
                if set(last_names([annotation.value])) & set(WRAPPERS):
                    return self._annotated(wrapped, module)
                return self._annotated(annotation.value, module)
            case ast.Name() | ast.Attribute():
                found = self._evaluated(annotation, module)
                return found if isinstance(found, Class) else None
        return None

    def _evaluated(
        self, value: ast.expr, module: str, owner: Class | None = None, within: Function | None = None
    ) -> Thing | None:
        """Symbol of an expression; for an instance its class."""
        found = self._read(value, module, owner, within)
        return None if isinstance(found, Unknown | Outside) else found

    def _read(
        self, value: ast.expr, module: str, owner: Class | None, within: Function | None
    ) -> Thing | Unknown | Outside | None:
        match value:
            case ast.Name(id=name):
                if within is not None:
                    arguments = (*within.args.posonlyargs, *within.args.args, *within.args.kwonlyargs)
                    for argument in arguments:
                        if argument.arg == name:
                            if owner is not None and argument is arguments[0]:
                                return owner
                            known = argument.annotation
                            return None if known is None else self._annotated(known, module)
                return self._global(module, name)
            case ast.Attribute(value=inner, attr=name):
                thing = self._evaluated(inner, module, owner, within)
                return None if thing is None else self._step(thing, name)
            case ast.Call(func=function):
                thing = self._evaluated(function, module, owner, within)
                return None if thing is None or isinstance(thing, Module) else self._step(thing, CALL)
        return None


def _beyond(thing: Value) -> Unknown | Outside:
    annotation = thing.annotation if thing.function is None else thing.function.returns
    name = last_names([] if annotation is None else [annotation])[:1]
    return OUTSIDE if name and (name[0] == "Tensor" or hasattr(builtins, name[0])) else UNKNOWN
