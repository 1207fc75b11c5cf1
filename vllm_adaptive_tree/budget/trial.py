"""Requests that draft in a trial of a resting batch: what is learnt of a few is learnt of their kind."""

from collections.abc import Sequence

import numpy as np

SHARE, LEAST = 8, 2
"""One request in so many drafts in a trial, and at least so many of each kind."""


def trial_size(requests: int) -> int:
    """Number of requests that draft in a trial; 0: all."""
    size = max(LEAST, requests // SHARE)
    return size if size < requests else 0


class Turns:
    """Chooses the requests of a trial, others each time."""

    def __init__(self) -> None:
        self.turn = 0

    def chosen(self, greedy: Sequence[bool], few: int) -> list[bool]:
        """True for each request that drafts, of requests that are `greedy` or not; all if `few` is 0."""
        if not few:
            return [True] * len(greedy)
        kinds, chosen = np.array(greedy), np.zeros(len(greedy), dtype=bool)
        for kind in (False, True):
            places = np.flatnonzero(kinds == kind)
            count = min(len(places), max(LEAST, few * len(places) // len(kinds)))
            if count:
                chosen[places[(self.turn * count + np.arange(count)) % len(places)]] = True
        self.turn += 1
        return chosen.tolist()
