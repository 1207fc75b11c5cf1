"""Small queries of Python's syntax trees."""

import ast
from collections.abc import Iterator, Sequence

from tools.vllm_diff.signature import Function


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, with those inside `if`, `try` and `with`."""
    for statement in body:
        yield statement
        if not isinstance(statement, Function | ast.ClassDef):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, part, ()):
                    yield from statements(inner.body) if isinstance(inner, ast.ExceptHandler) else statements([inner])


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None, ast.expr | None]]:
    """Target, value and annotation of an assignment; the value only if it is the target's alone."""
    match node:
        case ast.AnnAssign():
            yield node.target, node.value, node.annotation
        case ast.Assign():
            for target in node.targets:
                if isinstance(target, ast.Tuple | ast.List):
                    yield from ((one, None, None) for one in target.elts)
                else:
                    yield target, node.value, None
        case ast.For(target=target) | ast.withitem(optional_vars=ast.expr() as target):
            yield target, None, None


def kept(method: Function) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """Attribute, value and annotation of each assignment of a method to its first argument's attributes."""
    this = method.args.args[0].arg if method.args.args else None
    for node in ast.walk(method):
        for target, value, annotation in assigned(node):
            match target:
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == this:
                    yield attribute, value, annotation


def sides(union: ast.expr) -> list[ast.expr]:
    if isinstance(union, ast.BinOp):
        return sides(union.left) + sides(union.right)
    return [union]


def last_names(expressions: Sequence[ast.expr]) -> list[str]:
    """Last names of decorators, bases and annotations."""
    found = []
    for one in expressions:
        while isinstance(one, ast.Call | ast.Subscript):
            one = one.func if isinstance(one, ast.Call) else one.value
        if isinstance(one, ast.Attribute):
            found.append(one.attr)
        elif isinstance(one, ast.Name):
            found.append(one.id)
    return found


def is_property(function: Function) -> bool:
    return any(name.endswith("property") for name in last_names(function.decorator_list))


def sets_property(function: Function) -> bool:
    """Return whether the function is a `@name.setter` or `@name.deleter`."""
    return bool({"setter", "deleter"} & set(last_names(function.decorator_list)))


def mentions(tree: ast.Module, name: str) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == name for node in ast.walk(tree))
