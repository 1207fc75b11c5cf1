"""Uses of vLLM in a package of ours, found by reading it, so that the list cannot become outdated."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.vllm_diff.scope import OwnClass, Scope
from tools.vllm_diff.signature import Call, Function, Signature
from tools.vllm_diff.sources import ROOT
from tools.vllm_diff.symbols import CALL, Trail
from tools.vllm_diff.syntax import assigned

OBJECT = frozenset(dir(object)) - {"__init__"} | {"__dict__", "__name__"}
"""Names that every object has."""


class Use(NamedTuple):
    path: Trail
    place: str  # file:line
    own: bool = False  # True if the name is ours too: a use only where a base class of vLLM's has it
    call: Call | None = None
    whole: bool = False  # True if it is handed on: every parameter counts
    replaced: bool = False  # True if vLLM calls something of ours in its place
    ours: Signature | None = None  # of that, where it is known


PLAIN = Use((), "")


def uses(folder: Path) -> list[Use]:
    """Uses in a package, file by file. Raises SyntaxError for a file that is not Python's."""
    classes: dict[Trail, OwnClass] = {}
    readers, nodes = [], []
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_bytes())
        module = file.relative_to(folder.parent).with_suffix("").parts
        own = {node.name: (*module, node.name) for node in tree.body if isinstance(node, ast.ClassDef)}
        scope = Scope({**dict(_imports(tree, (ROOT, folder.name))), **own}, classes)
        readers.append(_Reader(file.relative_to(folder).as_posix(), tree, scope))
        nodes += [(own[node.name], node, scope) for node in tree.body if isinstance(node, ast.ClassDef)]
    for _ in range(2):  # what a member is may depend on a class that is read later
        for path, node, scope in nodes:
            classes[path] = scope.own_class(node)
    return [use for reader in readers for use in reader.uses()]


class _Reader(ast.NodeVisitor):
    def __init__(self, place: str, tree: ast.Module, scope: Scope):
        self.place, self.tree, self.scope = place, tree, scope
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
        self.shared: set[str] = set()  # names that the function says are global
        self.inside = False  # of a function
        self.found: list[Use] = []

    def uses(self) -> list[Use]:
        self.visit(self.tree)
        return self.found

    def _use(self, path: Trail, node: ast.AST, use: Use = PLAIN) -> None:
        if path[-1] not in OBJECT and path[-1] != CALL:
            self.found.append(use._replace(path=path, place=f"{self.place}:{getattr(node, 'lineno', 0)}"))

    def _use_of(self, node: ast.expr, use: Use) -> None:
        """Add a use of a name or an attribute, without its inner parts."""
        path = self.scope.path(node)
        if isinstance(node, ast.Attribute) and (base := self.scope.path(node.value)) is not None and base[0] != ROOT:
            own = self.scope.own_member(base[:-1] if base[-1] == CALL else base, node.attr) is not None
            path = self.scope.inherited(base, node.attr)
            use = use._replace(own=own)
        if path is not None and path[0] == ROOT:
            self._use(path, node, use)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == ROOT:
                self._use(tuple(alias.name.split(".")), node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if node.module and node.module.split(".")[0] == ROOT and not node.level:
                self._use((*node.module.split("."), alias.name), node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        path, outside, names = self.scope.names.get(node.name), self.scope.own, dict(self.scope.names)
        self.scope.own = path if path in self.scope.classes else None
        base = None if self.scope.own is None else self.scope.base(self.scope.own)
        if base is not None:
            for statement in node.body:
                if isinstance(statement, Function):
                    override = PLAIN._replace(own=True, replaced=True, ours=_signature(statement))
                    self._use((*base, CALL, statement.name), statement, override)
                for target, _, _ in assigned(statement):
                    if isinstance(target, ast.Name):
                        self._use((*base, CALL, target.id), statement, PLAIN._replace(own=True))
        self.generic_visit(node)
        self.scope.own, self.scope.names = outside, names

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: Function) -> None:
        names, inside, shared = self.scope.names, self.inside, self.shared
        self.scope.names = {**names, **self.scope.parameters(node, None if inside else self.scope.own)}
        self.inside, self.shared = True, set()
        self.generic_visit(node)
        names.update((name, self.scope.names.get(name)) for name in self.shared)
        self.scope.names, self.inside, self.shared = names, inside, shared

    def visit_Global(self, node: ast.Global) -> None:
        self.shared.update(node.names)

    def visit_Call(self, node: ast.Call) -> None:
        open_ = any(isinstance(one, ast.Starred) for one in node.args) or any(one.arg is None for one in node.keywords)
        positional = sum(not isinstance(one, ast.Starred) for one in node.args)
        call = Call(positional, frozenset(one.arg for one in node.keywords if one.arg), open_)
        self._use_of(node.func, PLAIN._replace(call=call))
        if isinstance(node.func, ast.Attribute):
            self.visit(node.func.value)
        elif not isinstance(node.func, ast.Name):
            self.visit(node.func)
        if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str):
            base = self.scope.path(node.args[0])  # getattr, setattr, `swapped`
            if base is not None and base[0] == ROOT and node.args[1].value.isidentifier():
                self._use((*base, node.args[1].value), node, PLAIN._replace(whole=True))
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        loads = isinstance(node.ctx, ast.Load)
        self._use_of(node, PLAIN._replace(whole=loads, replaced=not loads))
        self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._use_of(node, PLAIN._replace(whole=True))
        else:
            self.scope.names[node.id] = None

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            path = tuple(node.value.split("."))  # the name of a module, for `python -m`
            if path[0] == ROOT and len(path) > 1 and all(name.isidentifier() for name in path):
                self._use(path, node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            stands_for = [self.scope.path(value) for _, value in pairs]
            for (one, value), path in zip(pairs, stands_for, strict=True):
                if isinstance(one, ast.Attribute) and isinstance(value, ast.Name) and value.id in self.functions:
                    ours = _signature(self.functions[value.id])
                    self._use_of(one, PLAIN._replace(replaced=True, ours=ours))
                    self.visit(one.value)
                else:
                    self.visit(one)
                if isinstance(one, ast.Name):
                    self.scope.names[one.id] = path

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        self.visit(node.target)
        self.visit(node.annotation)
        if isinstance(node.target, ast.Name):
            self.scope.names[node.target.id] = self.scope.annotated(node.annotation) or self.scope.path(node.value)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        names = dict(self.scope.names)
        for generator in node.generators:
            self.visit(generator)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self.scope.names = names

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension  # noqa: N815


def _signature(function: Function) -> Signature:
    arguments = function.args.args
    return Signature.of(function, bound=bool(arguments) and arguments[0].arg in ("self", "cls"))


def _imports(tree: ast.Module, packages: tuple[str, ...]) -> Iterator[tuple[str, Trail]]:
    """Symbols that the names imported from some packages stand for, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.split(".")[0] in packages:
                for alias in node.names:
                    yield alias.asname or alias.name, (*node.module.split("."), alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                path = tuple(alias.name.split("."))
                if path[0] in packages:
                    yield alias.asname or path[0], path if alias.asname else path[:1]
