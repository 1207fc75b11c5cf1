"""Costs of forwards: seconds by rows, measured at start-up and corrected by live steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_adaptive_tree.budget import curve_loops as loops
from vllm_adaptive_tree.budget.curve_loops import TINY
from vllm_adaptive_tree.json_numbers import member, number

FAR = float(1 << 30)
"""Rows to which a curve is extrapolated beyond its last point."""
FIRST = 4.0
"""Most that building kernels makes of the time of a forward."""
TILES = 4, 8, 16, 32, 64
"""Rows of tiles of matrix units, and of kernels of CPUs: one more row may cost as much as a tile, which linear
interpolation would miss."""


def profiled_rows(most: int) -> list[int]:
    """Row counts that a profile measures: 1, 2, 3, 4, 6, 8, 12, .. up to `most`, and one past each of `TILES`."""
    steps = {2**k * factor // 2 for k in range(20) for factor in (2, 3)}
    return sorted({min(rows, most) for rows in steps | {1 + tile for tile in TILES}})


class Curve:
    """Seconds of a forward by its rows: points, linearly interpolated.

    It is flat before the first point, extrapolated beyond the last with the last slope or the mean one, whichever is
    larger, and never decreasing: a point counts for at most the value of those after it. So a forward that was too slow
    does not keep larger ones from being tried.

    Live forwards correct the points near them; a point that has seen none is corrected as its neighbours are.
    """

    def __init__(self, rows: ArrayLike, seconds: ArrayLike, sizes: Sequence[int] = ()):
        """`rows` [P] increasing, P >= 2; `seconds` [P]; `sizes` increasing: a forward of up to the last of them runs,
        and costs, as many rows as the next one has."""
        self.sizes = np.asarray(sizes, dtype=np.float64)
        self._rows = np.asarray(rows, dtype=np.float64)
        start, places = np.asarray(seconds, np.float64).copy(), np.append(self._rows, self._rows[-1] + FAR)
        off, seen, measured, y = (np.zeros(len(array)) for array in (start, start, start, places))
        self._points = places, start, off, seen, measured, y
        """As `curve_loops` takes them."""
        self._x, self._y, self._seen = places, y, seen
        loops.settle(*self._points)

    @property
    def rows(self) -> NDArray[np.float64]:
        return self._rows

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds [P] at each point."""
        return self._y[:-1].copy()

    def at(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Seconds for an array of row counts, of any shape."""
        return np.interp(self.padded(rows), self._x, self._y)

    def cost(self, rows: float) -> float:
        """Seconds for one row count."""
        return float(loops.cost(self._x, self._y, float(self.padded(rows)) if len(self.sizes) else float(rows)))

    def padded(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Row counts that forwards of so many rows run with, of any shape."""
        rows = np.asarray(rows, dtype=np.float64)
        if not len(self.sizes):
            return rows
        size = self.sizes[np.searchsorted(self.sizes[:-1], rows)]
        return np.maximum(rows, size)

    def observe(self, rows: int, seconds: float) -> None:
        """Record a forward of `rows` rows in `seconds`."""
        loops.observe(*self._points, float(int(self.padded(rows))), seconds)

    def observe_first(self, rows: int, seconds: float) -> None:
        """Record the first forward of so many rows if it took longer than building kernels explains."""
        if seconds > FIRST * self.cost(rows):
            self.observe(rows, seconds / FIRST)

    def knows(self, rows: int) -> bool:
        """Return whether live forwards of about so many rows were seen."""
        right = min(max(int(np.searchsorted(self._x, self.padded(rows))), 1), len(self._rows))
        return bool(self._seen[right - 1 : right + 1].sum() >= loops.SEEN)

    def to_json(self) -> dict[str, Any]:
        return {"rows": self._rows.astype(int).tolist(), "seconds": self.seconds.tolist()}

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
        points = zip(self._rows, self.seconds, strict=True)
        return ", ".join(f"{rows:.0f}: {1000 * seconds:.2f}" for rows, seconds in points)


@dataclass(frozen=True)
class Costs:
    verify: Curve
    """Seconds of a verification by rows, with empty contexts."""
    draft: Curve
    """Seconds of a draft level by rows; on Model Runner V2 by requests."""
    context: float = 0.0
    """Additional seconds of each row of a verification, per token of its context."""

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
            f"of a row for 1000 tokens of its context: {1e6 * self.context:.2f}"
        )


FREE = Costs(Curve([0, 1], [TINY, TINY]), Curve([0, 1], [TINY, TINY]))
"""Costs for a budget that needs none."""
