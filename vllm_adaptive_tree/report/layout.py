"""Places of a tree's nodes, for the picture of the pages and the page of a record."""

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    depth: int
    row: int


def places(parents: Sequence[int]) -> list[Place]:
    """Places of the root and of every node; `parents`: -1 is the root, and parents come before their children.

    A first child keeps its parent's row, any other begins a row below all that is above it. So an edge has only the gap
    between two columns to cross.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    found = [Place(0, 0)] * (1 + len(parents))
    rows = 1
    pending = [(-1, 0, 0)]
    while pending:
        node, depth, row = pending.pop()
        if row < 0:
            row, rows = rows, rows + 1
        found[1 + node] = Place(depth, row)
        below = children.get(node, [])
        pending += [(child, depth + 1, row if child == below[0] else -1) for child in reversed(below)]
    return found


def visible(text: str, most: int) -> str:
    """Text of a token in at most so many characters, with whitespace made visible."""
    shown = text.replace("\n", "\u23ce").replace("\t", "\u21e5").replace(" ", "\u00b7")
    return shown if len(shown) <= most else f"{shown[: most - 1]}\u2026"
