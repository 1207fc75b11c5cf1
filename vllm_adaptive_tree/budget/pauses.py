"""Per-request back-off from drafting."""

from collections.abc import Iterable, Sequence

LOSSES = 16
"""Trees of a request in a row of which no node was worth its row, before it pauses; after a pause, one."""
PAUSE = 64
"""Steps of the batch, which are tokens of the request."""


class Pauses:
    """Requests that pause from drafting because the trees of others are worth more, each on its own.

    When the batch shrinks (by powers of two), rows are cheaper, and all are tried again.
    """

    def __init__(self) -> None:
        self.lost: dict[str, int] = {}
        self.left: dict[str, int] = {}
        self.size = 0

    def drafting(self, requests: Sequence[str]) -> list[bool]:
        """Which of the batch's `requests` draft in this step; counts a step of the pauses."""
        size = len(requests).bit_length()
        if size < self.size:
            self.left.clear()
        self.size = size
        drafting = []
        for request in requests:
            left = self.left.get(request, 0)
            drafting.append(left == 0)
            if left:
                self.left[request] = left - 1
        return drafting

    def observe(self, requests: Iterable[str], kept: Iterable[int]) -> None:
        """How many nodes of the trees of these `requests` were worth their rows."""
        for request, count in zip(requests, kept, strict=True):
            self.lost[request] = 0 if count else self.lost.get(request, 0) + 1
            if self.lost[request] >= LOSSES:
                self.left[request], self.lost[request] = PAUSE, LOSSES - 1

    def forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            self.lost.pop(request, None)
            self.left.pop(request, None)
