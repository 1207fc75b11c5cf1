"""Costs of forwards: seconds by rows, measured at start-up and corrected by live steps."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_adaptive_tree.json_numbers import member, number

SAMPLES = 32.0
"""Most forwards at a point that count against a new one: the times of one row count scatter by 5 to 10 %."""
SEEN = 0.25
"""Weight of forwards near a point from which on its own correction is used."""
BOUND = math.log(2)
"""Largest deviation (log) of one forward that counts. More is a stall, or the machine has changed: earlier forwards
then count half."""
TINY = 1e-9
"""Lower bound of the seconds of any forward."""
FAR = float(1 << 30)
"""Rows to which a curve is extrapolated beyond its last point."""
TILES = 16, 32, 64
"""Rows of matrix-unit tiles: one more row may cost as much as a tile, which linear interpolation would miss."""


def profiled_rows(most: int) -> list[int]:
    """Row counts that a profile measures: 1, 2, 3, 4, 6, 8, 12, .. up to `most`, and one past each tile."""
    steps = {2**k * factor // 2 for k in range(20) for factor in (2, 3)}
    return sorted({min(rows, most) for rows in steps | {1 + tile for tile in TILES}})


class Curve:
    """Seconds of a forward by its rows: points, linearly interpolated.

    It is flat before the first point, extrapolated with the last slope beyond the last, and never decreasing: a point
    counts for at most the value of those after it. So a forward that was too slow does not keep larger ones from being
    tried.

    Live forwards correct the points near them; a point that has seen none is corrected as its neighbours are.
    """

    def __init__(self, rows: ArrayLike, seconds: ArrayLike, sizes: Sequence[int] = ()):
        """`rows` [P] increasing, P >= 2; `seconds` [P]; `sizes` increasing: a forward of up to the last of them runs,
        and costs, as many rows as the next one has."""
        self.sizes = np.asarray(sizes, dtype=np.float64)
        self._rows = np.asarray(rows, dtype=np.float64)
        self._start = np.asarray(seconds, dtype=np.float64)
        self._off = np.zeros(len(self._rows))  # log of the correction
        self._seen = np.zeros(len(self._rows))
        self._settle()

    def _settle(self) -> None:
        place, known = np.arange(len(self._rows)), self._seen >= SEEN
        if known.any():
            self._off = np.interp(place, place[known], self._off[known])
        self._measured = self._start * np.exp(self._off)
        before = np.maximum.accumulate(np.where(known, self._measured, 0.0))  # of forwards seen with fewer rows
        self._measured = np.where(known, self._measured, np.maximum(self._measured, before))
        seconds = np.minimum.accumulate(self._measured[::-1])[::-1]
        slope = (seconds[-1] - seconds[-2]) / (self._rows[-1] - self._rows[-2])
        self._x, self._y = [*self._rows.tolist(), self._rows[-1] + FAR], [*seconds.tolist(), seconds[-1] + slope * FAR]
        self._hull: Curve | None = None

    @property
    def rows(self) -> NDArray[np.float64]:
        return self._rows

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds [P] at each point."""
        return np.array(self._y[:-1])

    def at(self, rows: Sequence[float] | NDArray[Any]) -> NDArray[np.float64]:
        """Seconds for an array of row counts, of any shape."""
        return np.interp(self.padded(rows), self._x, self._y)

    def cost(self, rows: float) -> float:
        """Seconds for one row count."""
        rows = float(self.padded(rows))
        right = self._right(rows)
        (x0, x1), (y0, y1) = self._x[right - 1 : right + 1], self._y[right - 1 : right + 1]
        return y0 + (y1 - y0) / (x1 - x0) * max(0.0, rows - x0)

    def padded(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Row counts that forwards of so many rows run with, of any shape."""
        rows = np.asarray(rows, dtype=np.float64)
        if not len(self.sizes):
            return rows
        size = self.sizes[np.searchsorted(self.sizes[:-1], rows)]
        return np.maximum(rows, size)

    def _right(self, rows: float) -> int:
        """Right end of the segment that contains `rows` or is nearest to it."""
        return min(max(bisect_left(self._x, rows), 1), len(self._x) - 1)

    def hull(self) -> "Curve":
        """Convex lower hull of the points: each row costs at least as much as the one before."""
        if self._hull is None:
            kept: list[tuple[float, float]] = []
            for x, y in zip(self._x[:-1], self._y[:-1], strict=True):
                while len(kept) > 1:
                    (x0, y0), (x1, y1) = kept[-2:]
                    if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                        break
                    kept.pop()
                kept.append((x, y))
            self._hull = Curve(*zip(*kept, strict=True))
        return self._hull

    def observe(self, rows: int, seconds: float) -> None:
        """Record a forward of `rows` rows in `seconds`: the two nearest points follow, less the more they have seen."""
        rows = int(self.padded(rows))
        right = min(self._right(rows), len(self._rows) - 1)
        near, ends = slice(right - 1, right + 1), self._rows[right - 1 : right + 1]
        share = min(max((rows - ends[0]) / (ends[1] - ends[0]), 0.0), 1.0)
        weight = np.array([1 - share, share])
        believed = self.cost(rows) if rows > ends[1] else weight @ self._measured[near]
        off = math.log(max(seconds, TINY) / believed)
        self._off[near] += min(max(off, -BOUND), BOUND) * weight / (1 + self._seen[near])
        self._seen[near] = np.minimum(self._seen[near] + weight, SAMPLES)
        if abs(off) > BOUND:
            self._seen /= 2
        self._settle()

    def knows(self, rows: int) -> bool:
        """Return whether live forwards of about so many rows were seen."""
        right = self._right(float(self.padded(rows)))
        return bool(self._seen[right - 1 : right + 1].sum() >= SEEN)

    def to_json(self) -> dict[str, Any]:
        return {"rows": self._rows.astype(int).tolist(), "seconds": self._y[:-1]}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read the output of `to_json`; raises ValueError for anything else."""
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

    def __str__(self) -> str:
        points = zip(self._rows, self._y, strict=False)
        return ", ".join(f"{rows:.0f}: {1000 * seconds:.2f}" for rows, seconds in points)


@dataclass(frozen=True)
class Costs:
    verify: Curve
    """Seconds of a verification by rows, with empty contexts."""
    draft: Curve
    """Seconds of a draft level by rows."""
    context: float = 0.0
    """Additional seconds of a verification per token of its requests' contexts."""

    def in_graphs(self, sizes: Sequence[int]) -> "Costs":
        """Costs of verifications that CUDA graphs of so many rows run."""
        verify = self.verify
        return replace(self, verify=Curve(verify.rows, verify.seconds, sizes)) if sizes else self

    def to_json(self) -> dict[str, Any]:
        return {"verify": self.verify.to_json(), "draft": self.draft.to_json(), "context": self.context}

    @classmethod
    def from_json(cls, data: Any) -> "Costs":
        """Read the output of `to_json`; raises ValueError for anything else."""
        verify, draft = (Curve.from_json(member(data, name)) for name in ("verify", "draft"))
        return cls(verify, draft, number(member(data, "context")))

    def __str__(self) -> str:
        return (
            f"ms of a verification by rows: {self.verify}; of a draft level by rows: {self.draft}; "
            f"for 1000 tokens of context: {1e6 * self.context:.2f}"
        )


FREE = Costs(Curve([0, 1], [TINY, TINY]), Curve([0, 1], [TINY, TINY]))
"""Costs for a budget that needs none."""
