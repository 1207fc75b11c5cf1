"""Timing forwards when the engine starts, on a machine that may be busy with other things."""

import time
from collections.abc import Callable, Sequence
from typing import Any

LOWEST, HIGHEST = 0.05, 0.9
"""Of a measured threshold."""

POINTS = 2
"""Of a curve, at least: measured however long they take."""

Prepare = Callable[[], Callable[[], Any]]
"""Returns the forward to time; what it does itself is not timed."""


def threshold(ratio: float) -> float:
    """OPT-Tree's mu, from what a draft level costs in target forwards (arXiv 2406.17276)."""
    return min(max(ratio, LOWEST), HIGHEST)


def fastest(
    forwards: Sequence[Prepare],
    *,
    rounds: int,
    seconds: float,
    least: int,
    late: Callable[[bool], bool] = lambda late: late,
    timed: Callable[[Callable[[], Any]], float] | None = None,
) -> list[float]:
    """The least seconds of each forward over `rounds` rounds, each of which runs all of them once: whatever slows the
    machine for a while slows all alike, and one quiet round is enough. A first round, not counted, warms up.

    After `seconds` the warming round ends, and what it has not come to is left out (the first `least` are always kept),
    or no further round begins. `late` makes all ranks agree on that. `timed` runs a forward and returns its seconds.
    """
    timed, started = timed or _timed, time.perf_counter()
    kept: list[Prepare] = []
    for prepare in forwards:
        timed(prepare())
        kept.append(prepare)
        if late(len(kept) >= least and time.perf_counter() - started > seconds):
            break
    found = [float("inf")] * len(kept)
    for _ in range(rounds):
        found = [min(best, timed(prepare())) for best, prepare in zip(found, kept, strict=True)]
        if late(time.perf_counter() - started > seconds):
            break
    return found


def _timed(forward: Callable[[], Any]) -> float:
    started = time.perf_counter()
    forward()
    return time.perf_counter() - started
