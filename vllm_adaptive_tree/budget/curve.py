"""Cost curves: seconds of a forward by its rows, updated from live steps."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_adaptive_tree.budget.reading import number

STEP = 0.1
"""Fraction by which one measurement moves a point of the curve towards itself, in log seconds."""
BOUND = 0.25
"""Largest deviation taken into account; more is attributed to a stall of the machine."""
SURE = 4
"""Repeated deviations beyond BOUND on one side are not a stall: the bound doubles with each, up to this many."""
NEAR = 0.25
"""Smallest weight with which a measurement counts as one of the point itself."""
TINY = 1e-9
"""Lower bound of the seconds of any forward."""
STALE = 64
"""After this many measurements elsewhere a point follows all of them: the machine as a whole has changed."""
FAR = float(1 << 30)
"""How many rows a curve is extrapolated beyond its last point."""
TILES = 16, 32, 64
"""Row counts of matrix-unit tiles: one more row may cost as much as a tile, which a straight line would hide."""


def profiled_rows(most: int) -> list[int]:
    """The row counts a profile measures: 1, 2, 3, 4, 6, 8, 12, .. up to `most`, and one past each tile."""
    steps = {2**k * factor // 2 for k in range(20) for factor in (2, 3)}
    return sorted({min(rows, most) for rows in steps | {1 + tile for tile in TILES}})


class Curve:
    """Seconds of a forward by its rows: measured points, linearly interpolated, tracking changes over time.

    Flat before the first point, extrapolated with the last slope beyond the last, and never decreasing: a point counts
    for at most the value of those after it. So one slow measurement does not make more rows look more expensive, and a
    measurement that was too fast gets tried and corrected.
    """

    def __init__(self, rows: ArrayLike, seconds: ArrayLike):
        """`rows` [P] increasing, P >= 2; `seconds` [P]."""
        # lists: short, and updated one point at a time
        self._rows: list[float] = np.asarray(rows, dtype=np.float64).tolist()
        self._measured: list[float] = np.asarray(seconds, dtype=np.float64).tolist()
        self._missed = [STALE] * len(self._rows)  # measurements since the last one near each point
        self._beyond = 0  # consecutive measurements beyond the bound; negative: below it
        self._settle()

    def _settle(self) -> None:
        """Recompute the effective points and the lines through them."""
        x, measured, known = self._rows, self._measured[:], 0.0
        for place, missed in enumerate(self._missed):  # stale points cost no less than live ones before them
            if missed >= STALE:
                measured[place] = max(measured[place], known)
            else:
                known = max(known, measured[place])
        self._seconds = y = list(accumulate(reversed(measured), min))[::-1]
        self._x, self._y = x[:1], y[:1]
        for right in range(1, len(x)):
            left = right - 1
            if measured[left] < y[right] < measured[right]:  # rise to the right point's effective value, then flat
                share = (y[right] - measured[left]) / (measured[right] - measured[left])
                self._x.append(x[left] + (x[right] - x[left]) * share)
                self._y.append(y[right])
            self._x.append(x[right])
            self._y.append(y[right])
        self._x.append(x[-1] + FAR)
        self._y.append(y[-1] + (y[-1] - y[-2]) / (x[-1] - x[-2]) * FAR)
        self._hull: Curve | None = None

    @property
    def rows(self) -> NDArray[np.float64]:
        return np.array(self._rows)

    @property
    def seconds(self) -> NDArray[np.float64]:
        """[P]: the effective value of each point."""
        return np.array(self._seconds)

    def at(self, rows: Sequence[float] | NDArray[Any]) -> NDArray[np.float64]:
        """Seconds for an array of row counts, of any shape."""
        return np.interp(rows, self._x, self._y)

    def cost(self, rows: float) -> float:
        """Seconds for one row count."""
        return _interpolate(self._x, self._y, rows)

    def hull(self) -> "Curve":
        """The convex lower hull: each row costs at least as much as the one before."""
        if self._hull is not None:
            return self._hull
        kept: list[int] = []
        points = list(zip(self._rows, self._seconds, strict=True))
        for index, (x, y) in enumerate(points):
            while len(kept) > 1:
                (x0, y0), (x1, y1) = points[kept[-2]], points[kept[-1]]
                if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                    break
                kept.pop()
            kept.append(index)
        self._hull = Curve(*zip(*(points[index] for index in kept), strict=True))
        return self._hull

    def observe(self, rows: int, seconds: float) -> None:
        """Record that a forward of `rows` rows took `seconds`.

        The two nearest points follow by their interpolation weights, within bounds; stale points, initially all points
        of the profile, follow in full.
        """
        believed = self.cost(rows) if rows > self._rows[-1] else _interpolate(self._rows, self._measured, rows)
        off = self._bounded(math.log(max(seconds, TINY) / believed))
        right = _right(self._rows, rows)
        left_at, right_at = self._rows[right - 1 : right + 1]
        share = min(max((rows - left_at) / (right_at - left_at), 0), 1)
        for place, missed in enumerate(self._missed):
            own = share if place == right else 1 - share if place == right - 1 else 0.0
            self._measured[place] *= math.exp(STEP * (1.0 if missed >= STALE else own) * off)
            self._missed[place] = 0 if own >= NEAR else missed + 1
        self._settle()

    def _bounded(self, off: float) -> float:
        side = (off > BOUND) - (off < -BOUND)
        self._beyond = self._beyond + side if side * self._beyond > 0 else side
        bound = BOUND * 2 ** max(0, min(abs(self._beyond), SURE) - 1)
        return min(max(off, -bound), bound)

    def to_json(self) -> dict[str, Any]:
        return {"rows": [int(x) for x in self._rows], "seconds": self._seconds}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raises ValueError for anything but the output of `to_json`."""
        try:
            rows, seconds = ([number(x) for x in data[key]] for key in ("rows", "seconds"))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError('a curve is {"rows": [numbers], "seconds": [numbers]}') from error
        rising = all(a < b for a, b in pairwise(rows))
        if len(rows) != len(seconds) or len(rows) < 2 or not rising or not all(x >= TINY for x in seconds):
            raise ValueError(
                "a curve needs two or more points, their rows increasing, their seconds at least a nanosecond"
            )
        return cls(rows, seconds)


def _right(x: list[float], at: float) -> int:
    """Index of the right end of the segment that contains `at` or is nearest to it."""
    return min(max(bisect_left(x, at), 1), len(x) - 1)


def _interpolate(x: list[float], y: list[float], at: float) -> float:
    right = _right(x, at)
    left = right - 1
    return y[left] + (y[right] - y[left]) / (x[right] - x[left]) * max(0, at - x[left])
