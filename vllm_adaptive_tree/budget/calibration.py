"""Calibrated acceptance probabilities of nodes, from the outcomes of past steps."""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.budget.reading import member, numbers, short

DEPTHS, BINS = 16, 24
LOWEST = 1e-4
"""Values below this are useless and share a bin."""
PRIOR = 8.0
"""Weight of the draft's own probability in every bin, in observations."""
MEMORY = 300.0
"""Observations of a bin after which an old one has weight 1/e."""
SCALE, OFFSET = -BINS / math.log(LOWEST), BINS + 0.5
"""SCALE * log(value) + OFFSET: the position of a value among the centres of bins 1 to BINS."""
ROW = BINS + 2


class Calibration:
    """How often nodes of a depth and value were accepted: maps a value to an acceptance probability.

    It depends on past steps, depth and value only, and never decreases with the value, so pruning by calibrated values
    depends on a sampled token no more than the value itself does.
    """

    def __init__(self) -> None:
        # [1 + DEPTHS, ROW], flattened; depth 0 and the first and last column hold no observations
        centre = [LOWEST ** (1 - (bin_ + 0.5) / BINS) for bin_ in range(BINS)]
        prior = [0.0, *(PRIOR * chance for chance in centre), 0.0]  # a bin starts at its nodes' own predictions
        self.hits = array("d", prior * (1 + DEPTHS))
        self.trials = array("d", [PRIOR] * len(self.hits))
        self.chance = array("d", [0.0] * len(self.hits))
        self.predicted = self.observed = 0.0
        """Sums over all nodes verified so far: expected and actual acceptances."""
        self._low = np.frombuffer(self.chance)
        self._high = self._low[1:]
        for depth in range(1, 1 + DEPTHS):
            self._settle(depth)

    def _settle(self, depth: int) -> None:
        first, end = depth * ROW + 1, depth * ROW + 1 + BINS
        self.chance[first:end] = array("d", _rising(self.hits[first:end], self.trials[first:end]))
        self.chance[end] = self.chance[end - 1]

    def __call__(self, value: Tensor, depth: Tensor) -> Tensor:
        """Acceptance probability [...] of a node of this value and depth (1: child of the root); 0 for NaN."""
        one = value.numpy()
        place = SCALE * np.log(np.minimum(np.fmax(one, LOWEST), 1).astype(np.float64)) + OFFSET
        left = place.astype(np.int64)
        cell = left + ROW * np.minimum(depth.numpy(), DEPTHS)
        low = self._low[cell]
        chance = low + (self._high[cell] - low) * (place - left)
        return torch.from_numpy(np.where(one > 0, chance, 0.0))

    def observe(self, value: Sequence[float], depth: Sequence[int], accepted: Sequence[bool]) -> None:
        """Record M verified nodes, and which of them were accepted."""
        new: dict[int, list[bool]] = {}
        for one, level, hit in zip(value, depth, accepted, strict=True):
            place = SCALE * math.log(min(max(LOWEST, one), 1)) + OFFSET
            left, row = int(place), min(level, DEPTHS) * ROW
            if one > 0:  # as in a call
                low, high = self.chance[row + left : row + left + 2]
                self.predicted += low + (high - low) * (place - left)
            new.setdefault(row + min(int(place + 0.5), BINS), []).append(hit)
        for cell, hits in new.items():
            fade = math.exp(-len(hits) / MEMORY)
            self.trials[cell] = self.trials[cell] * fade + len(hits)
            self.hits[cell] = self.hits[cell] * fade + sum(hits)
            self.observed += sum(hits)
        for level in {cell // ROW for cell in new}:
            self._settle(level)

    def to_json(self) -> dict[str, Any]:
        return {"hits": short(self.hits), "trials": short(self.trials)}

    def restore(self, data: Any) -> None:
        """Load the output of `to_json`. Raises ValueError, changing nothing, for other data."""
        count = len(self.hits)
        trials = numbers(member(data, "trials"), count, least=1e-3)
        hits = numbers(member(data, "hits"), count)
        if any(
            hit > 1.001 * trial for hit, trial in zip(hits, trials, strict=True)
        ):  # numbers are written with six digits
            raise ValueError("more nodes were accepted than verified")
        self.hits, self.trials = array("d", hits), array("d", trials)
        for depth in range(1, 1 + DEPTHS):
            self._settle(depth)


def _rising(hits: Sequence[float], trials: Sequence[float]) -> list[float]:
    """The ratios hits / trials, pooled with neighbours where they would decrease (isotonic regression).

    A running maximum would trust every lucky bin and predict too much.
    """
    pools: list[tuple[float, float, int]] = []
    for hit, trial in zip(hits, trials, strict=True):
        count = 1
        while pools and pools[-1][0] * trial >= hit * pools[-1][1]:
            more_hits, more_trials, more = pools.pop()
            hit, trial, count = hit + more_hits, trial + more_trials, count + more
        pools.append((hit, trial, count))
    return [hit / trial for hit, trial, count in pools for _ in range(count)]
