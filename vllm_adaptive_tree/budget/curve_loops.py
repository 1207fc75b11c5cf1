"""Loops over the P points of a `Curve`.

x [P + 1]: rows of the points, and of one far beyond them; y [P + 1]: seconds there. start [P]: seconds of the start;
off [P]: log of their correction; seen [P]: weight of the live forwards there; measured [P]: corrected seconds.
"""

# mypy: disable-error-code="untyped-decorator"

import math

import numpy as np

from vllm_adaptive_tree.compiled import njit

SAMPLES = 32.0
"""Most forwards at a point that count against a new one: the times of one row count scatter by 5 to 10 %."""
SEEN = 0.25
"""Weight of forwards near a point from which on its own correction is used."""
BOUND = math.log(2)
"""Largest deviation (log) of one forward that counts. More is a stall, or the machine has changed: earlier forwards
then count half."""
NEAR = 4.0
"""Multiple of the rows of the last point up to which a forward counts for it in full."""
TINY = 1e-9
"""Lower bound of the seconds of any forward."""

ARRAY = "float64[::1]"


@njit(f"void({ARRAY}, {ARRAY}, {ARRAY}, {ARRAY}, {ARRAY}, {ARRAY})")
def settle(x, start, off, seen, measured, y):  # type: ignore[no-untyped-def]
    """Correct the points that no forward was near as their neighbours are, and let none cost more than a later one."""
    points, left = len(start), -1
    for place in range(points):
        if seen[place] < SEEN:
            continue
        for between in range(left + 1, place):
            share = (between - left) / (place - left)
            off[between] = off[place] if left < 0 else off[left] + (off[place] - off[left]) * share
        left = place
    if left >= 0:
        off[left:] = off[left]
    least = 0.0  # seconds of known points with fewer rows
    for place in range(points):
        measured[place] = start[place] * math.exp(off[place])
        if seen[place] >= SEEN:
            least = max(least, measured[place])
        else:
            measured[place] = max(least, measured[place])
    y[:points] = measured
    for place in range(points - 2, -1, -1):
        y[place] = min(y[place], y[place + 1])
    last = points - 1  # a last point that came out too low must not make all rows after it free
    slope = max((y[last] - y[last - 1]) / (x[last] - x[last - 1]), (y[last] - y[0]) / (x[last] - x[0]))
    y[points] = y[last] + slope * (x[points] - x[last])


@njit(f"float64({ARRAY}, {ARRAY}, float64)")
def cost(x, y, rows):  # type: ignore[no-untyped-def]
    """Seconds for one row count."""
    right = min(max(np.searchsorted(x, rows), 1), len(x) - 1)
    slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
    return y[right - 1] + slope * max(0.0, rows - x[right - 1])


@njit(f"void({ARRAY}, {ARRAY}, {ARRAY}, {ARRAY}, {ARRAY}, {ARRAY}, float64, float64)")
def observe(x, start, off, seen, measured, y, rows, seconds):  # type: ignore[no-untyped-def]
    """Record a forward of `rows` rows in `seconds`: the two nearest points follow, less the more they have seen, and
    the last one less the farther it is from a forward with more rows.

    What a well-known point finds out about now, as that a machine has warmed up, holds for all others too, among them
    those that only slower times have seen.
    """
    right = min(max(np.searchsorted(x, rows), 1), len(start) - 1)
    share = min(max((rows - x[right - 1]) / (x[right] - x[right - 1]), 0.0), 1.0)
    believed = (1 - share) * measured[right - 1] + share * measured[right]
    right_weight = share
    if rows > x[right]:
        believed, right_weight = cost(x, y, rows), min(1.0, NEAR * x[right] / rows)
    more = math.log(max(seconds, TINY) / believed)
    step = min(max(more, -BOUND), BOUND)
    known = (1 - share) * seen[right - 1] + right_weight * seen[right]
    for place in range(len(start)):
        weight = 1 - share if place == right - 1 else right_weight if place == right else 0.0
        off[place] += step * (weight / (1 + seen[place]) + (1 - weight) * known / SAMPLES / (1 + SAMPLES))
        seen[place] = min(seen[place] + weight, SAMPLES)
    if abs(more) > BOUND:
        seen /= 2
    settle(x, start, off, seen, measured, y)
