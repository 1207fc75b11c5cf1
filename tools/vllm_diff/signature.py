"""Parameters of a function, and the effect of their change on callers, overrides and replacements."""

import ast
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Call(NamedTuple):
    """Call of ours."""

    positional: int
    keywords: frozenset[str]
    open: bool  # with * or **: what it passes is not known


class Signature(NamedTuple):
    """Signature without the instance or class that a bound method is given."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: frozenset[str]
    rest: bool  # *args
    others: bool  # **kwargs

    @classmethod
    def of(cls, function: Function, *, bound: bool) -> "Signature":
        found = function.args
        positional = [argument.arg for argument in (*found.posonlyargs, *found.args)]
        required = set(positional[: len(positional) - len(found.defaults)])
        keyword_only = [argument.arg for argument in found.kwonlyargs]
        required |= {name for name, value in zip(keyword_only, found.kw_defaults, strict=True) if value is None}
        if bound and positional:
            required.discard(positional.pop(0))
        return cls(
            tuple(positional),
            tuple(keyword_only),
            frozenset(required),
            found.vararg is not None,
            found.kwarg is not None,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return self.positional + self.keyword_only


def broken_call(old: Signature, new: Signature, call: Call) -> list[str]:
    """Changes that break a call like ours; empty if none does."""
    changes = []
    passed = set(call.keywords) | set(new.positional[: call.positional])
    for index, name in enumerate(old.positional[: call.positional]):
        if index >= len(new.positional):
            changes += [] if new.rest else [f"-{name}"]
        elif new.positional[index] != name:
            changes.append(f"{name} -> {new.positional[index]}")
    known = new.names
    changes += [f"-{name}" for name in sorted(call.keywords) if name not in known and not new.others]
    if not call.open:
        changes += [f"+{name}" for name in new.names if name in new.required and name not in passed]
    return changes


def difference(old: Signature, new: Signature, ours: Signature | None = None, *, optional: bool = False) -> list[str]:
    """Parameters that were renamed, removed, or added without a default (with `optional` also those with one).

    `ours`, the function that vLLM calls in place of its own, may take parameters that it does not name.
    """

    def absorbed(name: str) -> bool:
        return ours is not None and ours.others and (ours.rest or name in new.keyword_only)

    gone = [name for name in old.names if name not in new.names]
    added = [name for name in new.names if name not in old.names and (optional or name in new.required)]
    if ours is not None:
        gone = [name for name in gone if name in ours.names or not absorbed(name)]
        added = [name for name in added if name not in ours.names and not absorbed(name)]
    changes = []
    for before, after in zip(old.positional, new.positional, strict=False):
        if before in gone and after not in old.names:
            gone.remove(before)
            added = [name for name in added if name != after]
            changes.append(f"{before} -> {after}")
    changes += [f"-{name}" for name in gone] + [f"+{name}" for name in added]
    common = [[name for name in one.positional if name in many.positional] for one, many in ((old, new), (new, old))]
    if common[0] != common[1]:
        changes.append(f"order {', '.join(common[1])}")
    return changes
