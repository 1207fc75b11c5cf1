"""Comparison of all symbols that we use with another release."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from tools.vllm_diff.signature import broken_call, difference
from tools.vllm_diff.symbols import CALL, Symbols, Trail
from tools.vllm_diff.things import Class, Missing, Outside, Unknown, Value
from tools.vllm_diff.uses import Use

MOST_PLACES = 3
"""Most places that define a name that counts as moved; more make it a common name."""

SHOWN_PLACES = 6


class Change(NamedTuple):
    symbol: str
    what: str
    places: tuple[str, ...]  # file:line of ours

    def __str__(self) -> str:
        more = len(self.places) - SHOWN_PLACES
        places = ", ".join(self.places[:SHOWN_PLACES]) + (f" and {more} more" if more > 0 else "")
        return f"{self.symbol}: {self.what}  [{places}]"


class Comparison(NamedTuple):
    changes: list[Change]
    followed: int  # symbols that both releases define
    unfollowed: list[str]  # symbols that one of them does not


def compare(found: Iterable[Use], old: Symbols, new: Symbols) -> Comparison:
    """Compare all uses. `old`: a release with which they are known to work."""
    by_path: dict[Trail, list[Use]] = defaultdict(list)
    for use in found:
        by_path[use.path].append(use)
    followed, unfollowed = 0, set()
    whats: dict[str, set[str]] = defaultdict(set)
    places: dict[str, set[str]] = defaultdict(set)

    def changed(symbol: Trail, what: str, among: Iterable[Use]) -> None:
        whats[shown(symbol)].add(what)
        places[shown(symbol)].update(use.place for use in among)

    for path, uses in by_path.items():
        before, after = old.find(path), new.find(path)
        if isinstance(before, Outside):
            continue
        if not isinstance(before, Missing | Unknown) and not isinstance(after, Unknown | Outside):
            followed += 1
            if isinstance(after, Missing):
                gone = _gone(path, after.at, old)
                changed(gone, _whereabouts(gone, old, new), uses)
            elif "function" in (kinds := (_kind(before), _kind(after))) and kinds[0] != kinds[1]:
                changed(path, f"{kinds[0]} became {kinds[1]}", uses)
            for use in uses:
                if parameters := _broken(use, old, new):
                    changed(path, f"parameters {', '.join(parameters)}", [use])
        elif all(use.own for use in uses) and isinstance(before, Missing) and before.at == len(path) - 1:
            if isinstance(after, Value | Class):
                changed(path, "new there, and a name of ours", uses)
        else:
            lost = before if isinstance(before, Missing | Unknown) else after
            end = lost.at if isinstance(lost, Missing | Unknown) else len(path) - 1
            unfollowed.add(shown(path[: end + 1 + (path[end] == CALL)]))
    changes = [
        Change(symbol, "; ".join(sorted(what)), tuple(sorted(places[symbol], key=_in_order)))
        for symbol, what in sorted(whats.items())
    ]
    return Comparison(changes, followed, sorted(unfollowed))


def shown(path: Trail) -> str:
    return ".".join(name for name in path if name != CALL)


def _in_order(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line)


def _kind(thing: object) -> str:
    if isinstance(thing, Value):
        return "function" if thing.is_function else "attribute"
    return "class" if isinstance(thing, Class) else "module"


def _broken(use: Use, old: Symbols, new: Symbols) -> list[str]:
    before, after = old.signature(use.path), new.signature(use.path)
    if before is None or after is None:
        return []
    if use.call is not None:
        return broken_call(before, after, use.call)
    if isinstance(old.find(use.path), Class):
        return []
    if use.replaced:
        return difference(before, after, use.ours, optional=True)
    return difference(before, after) if use.whole else []


def _gone(path: Trail, at: int, old: Symbols) -> Trail:
    """Part of a path to report: the missing part, or the symbol in the missing module."""
    return path[: max(at + 1, min(len(path), old.depth(path) + 1))]


def _whereabouts(gone: Trail, old: Symbols, new: Symbols) -> str:
    name, modules = gone[-1], old.depth(gone)
    if modules == len(gone):  # a module
        places = [module for module in new.sources.modules if module.split(".")[-1] == name]
    else:
        places = new.sources.defining(name, member=len(gone) > modules + 1)
    if not 0 < len(places) <= MOST_PLACES:
        return "gone"
    return f"moved to {' or '.join(places)}"
