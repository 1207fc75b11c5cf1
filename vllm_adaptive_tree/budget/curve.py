from typing import Any, Self

import torch
from torch import Tensor

STEP = 0.1
"""How far one measurement moves a point of the curve towards itself, in log seconds."""
BOUND = 0.25
"""The farthest that it may lie off; what a stalled machine adds beyond this is not believed."""


class Curve:
    """Seconds of a forward by its rows: measured points, straight lines between them, followed as times change.

    Before the first point it is flat, beyond the last it goes on with the slope of the last piece; it never falls: a
    point counts for no more than those behind it. So one slow measurement makes more rows look no dearer, and one that
    was too fast is tried, and corrected.
    """

    def __init__(self, rows: Tensor, seconds: Tensor):
        """`rows` [P] increasing, P >= 2; `seconds` [P]."""
        self.rows, self._measured = rows.double().contiguous(), seconds.double()
        self._hull: Curve | None = None
        self._settle()

    def _settle(self) -> None:
        """`seconds` [P]: what a point counts for."""
        self.seconds = self._measured.flip(0).cummin(0).values.flip(0)
        self._hull = None

    def at(self, rows: Tensor) -> Tensor:
        """Seconds for any number of rows, of any shape."""
        x = rows.double()
        behind = self.seconds[torch.searchsorted(self.rows, x).clamp(max=len(self.rows) - 1)]
        inside = torch.minimum(_interpolate(self.rows, self._measured, x), behind)
        return torch.where(x > self.rows[-1], _interpolate(self.rows, self.seconds, x), inside)

    def hull(self) -> "Curve":
        """The largest convex curve that is nowhere above this one: each row costs at least as much as the last."""
        if self._hull is not None:
            return self._hull
        kept: list[int] = []
        points = list(zip(self.rows.tolist(), self.seconds.tolist(), strict=True))
        for index, (x, y) in enumerate(points):
            while len(kept) > 1:
                (x0, y0), (x1, y1) = points[kept[-2]], points[kept[-1]]
                if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                    break
                kept.pop()
            kept.append(index)
        self._hull = Curve(self.rows[kept], self.seconds[kept])
        return self._hull

    def observe(self, rows: int, seconds: float) -> None:
        """A forward of `rows` rows took `seconds`: its nearest points follow, each by its share and within bounds."""
        x = torch.tensor(float(rows)).double()
        believed = self.at(x) if x > self.rows[-1] else _interpolate(self.rows, self._measured, x)
        off = (seconds / believed).log().clamp(-BOUND, BOUND)
        right = int(torch.searchsorted(self.rows, float(rows)).clamp(1, len(self.rows) - 1))
        left_at, right_at = self.rows[right - 1], self.rows[right]
        share = ((rows - left_at) / (right_at - left_at)).clamp(0, 1)
        weight = torch.zeros_like(self.rows)
        weight[right - 1], weight[right] = 1 - share, share
        self._measured = self._measured * (STEP * weight * off).exp()
        self._settle()

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows.long().tolist(), "seconds": self.seconds.tolist()}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raises ValueError where `data` is not what `to_json` gives."""
        try:
            rows, seconds = (torch.tensor([float(x) for x in data[key]]).double() for key in ("rows", "seconds"))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError('a curve is {"rows": [numbers], "seconds": [numbers]}') from error
        if len(rows) != len(seconds) or len(rows) < 2 or not (rows.diff() > 0).all() or not (seconds > 0).all():
            raise ValueError("a curve needs two or more points, their rows increasing, their seconds above 0")
        return cls(rows, seconds)


def _interpolate(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    right = torch.searchsorted(x, at).clamp(1, len(x) - 1)
    left = right - 1
    slope = (y[right] - y[left]) / (x[right] - x[left])
    return y[left] + slope * (at - x[left]).clamp(min=0)
