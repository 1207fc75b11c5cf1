"""Resolution of our names and expressions to symbols of vLLM."""

import ast
from typing import NamedTuple

from tools.vllm_diff.signature import Function
from tools.vllm_diff.sources import ROOT
from tools.vllm_diff.symbols import CALL, Trail
from tools.vllm_diff.syntax import assigned, kept, sides


class OwnClass(NamedTuple):
    bases: list[Trail]
    members: dict[str, Trail | None]  # name -> what it is, where that can be read


class Scope:
    """Names at one place of a file of ours."""

    def __init__(self, names: dict[str, Trail], classes: dict[Trail, OwnClass]):
        """`names`: of the module's imports and classes; `classes`: all of ours so far."""
        self.classes = classes
        self.names: dict[str, Trail | None] = dict(names)  # None: nothing of vLLM's
        self.own: Trail | None = None  # the class that is being read

    # -- what an expression stands for: a path of vLLM's, one of our classes (CALL behind either: its instance), or None

    def path(self, value: ast.expr | None) -> Trail | None:
        match value:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=inner, attr=name):
                return None if (base := self.path(inner)) is None else self._member(base, name)
            case ast.Call(func=ast.Name(id="super")) if self.own is not None:
                return self._instance(self.base(self.own))
            case ast.Call(func=function):
                return self._instance(self.path(function))
            case ast.Await(value=inner):
                return self.path(inner)
        return None

    def _instance(self, path: Trail | None) -> Trail | None:
        return None if path is None else (*path, CALL)

    def annotated(self, annotation: ast.expr | None) -> Trail | None:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            kinds = [side for side in sides(annotation) if not isinstance(side, ast.Constant)]
            annotation = kinds[0] if len(kinds) == 1 else None
        return self._instance(self.path(annotation))

    def _member(self, base: Trail, name: str) -> Trail | None:
        if base[0] == ROOT:
            return (*base, name)
        found = self.own_member(base[:-1] if base[-1] == CALL else base, name)
        return found[0] if found is not None else self.inherited(base, name)

    def own_member(self, own: Trail, name: str) -> tuple[Trail | None] | None:
        """Member of one of our classes or its bases among ours, in a tuple; None where it has no such member."""
        if own not in self.classes:
            return (None,)
        if name in self.classes[own].members:
            return (self.classes[own].members[name],)
        bases = (base for base in self.classes[own].bases if base[0] != ROOT)
        return next((found for base in bases if (found := self.own_member(base, name)) is not None), None)

    def inherited(self, base: Trail, name: str) -> Trail | None:
        """Path of the member below the first base class of vLLM's."""
        call = base[-1] == CALL
        found = self.base(base[:-1] if call else base)
        return None if found is None else (*found, CALL, name) if call else (*found, name)

    def base(self, own: Trail) -> Trail | None:
        """First base class of vLLM's. One that the class names itself comes before those of our mixins, its
        ancestors."""
        bases = self.classes[own].bases if own in self.classes else []
        named = (base for base in bases if base[0] == ROOT)
        of_ours = (found for base in bases if base[0] != ROOT and (found := self.base(base)) is not None)
        return next(named, None) or next(of_ours, None)

    # -- our classes

    def own_class(self, node: ast.ClassDef) -> OwnClass:
        bases = [path for base in node.bases if (path := self.path(base)) is not None]
        members: dict[str, Trail | None] = {}
        for statement in node.body:
            if isinstance(statement, Function | ast.ClassDef):
                members[statement.name] = None
            for target, value, annotation in assigned(statement):
                if isinstance(target, ast.Name):
                    members[target.id] = self.annotated(annotation) or self.path(value)
        outside = self.names
        for method in (one for one in node.body if isinstance(one, Function)):
            self.names = {**outside, **self.parameters(method, self.names[node.name])}
            for name, value, annotation in kept(method):
                if not members.get(name):
                    members[name] = self.annotated(annotation) or self.path(value)
            self.names = outside
        return OwnClass(bases, members)

    def parameters(self, function: Function, own: Trail | None) -> dict[str, Trail | None]:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        found = {argument.arg: self.annotated(argument.annotation) for argument in arguments}
        for rest in (function.args.vararg, function.args.kwarg):
            if rest is not None:
                found[rest.arg] = None
        decorators = {one.id for one in function.decorator_list if isinstance(one, ast.Name)}
        if own is not None and arguments and "staticmethod" not in decorators:
            found[arguments[0].arg] = own if "classmethod" in decorators else (*own, CALL)
        return found
