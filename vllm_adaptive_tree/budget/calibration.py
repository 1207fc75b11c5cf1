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
"""Values below this are of no use and share a bin."""
PRIOR = 8.0
"""Observations that the draft's own probability counts for in every bin."""
MEMORY = 300.0
"""Observations of a bin after which an old one weighs 1/e."""
SCALE, OFFSET = -BINS / math.log(LOWEST), BINS + 0.5
"""SCALE * log(value) + OFFSET: where a value lies among the centres of the bins 1 to BINS."""
ROW = BINS + 2


class Calibration:
    """How often nodes of a depth and value were accepted, so that a value becomes a chance.

    A function of past steps, of the depth and of the value alone, and never falling with the value: a cut by calibrated
    values asks nothing of the drawn token that the value does not.
    """

    def __init__(self) -> None:
        # [1 + DEPTHS, ROW], flat; depth 0 and the columns at both ends hold no observations
        centre = [LOWEST ** (1 - (bin_ + 0.5) / BINS) for bin_ in range(BINS)]
        prior = [0.0, *(PRIOR * chance for chance in centre), 0.0]  # a bin starts as its nodes' own predictions
        self.hits = array("d", prior * (1 + DEPTHS))
        self.trials = array("d", [PRIOR] * len(self.hits))
        self.chance = array("d", [0.0] * len(self.hits))
        self.predicted = self.observed = 0.0
        """Sums over all nodes verified so far: what was expected of them, and what was accepted."""
        self._low = np.frombuffer(self.chance)
        self._high = self._low[1:]
        for depth in range(1, 1 + DEPTHS):
            self._settle(depth)

    def _settle(self, depth: int) -> None:
        first, end = depth * ROW + 1, depth * ROW + 1 + BINS
        self.chance[first:end] = array("d", _rising(self.hits[first:end], self.trials[first:end]))
        self.chance[end] = self.chance[end - 1]

    def __call__(self, value: Tensor, depth: Tensor) -> Tensor:
        """The chance [...] that a node of this value and depth (1: below the root) is accepted; 0 for a NaN."""
        one = value.numpy()
        place = SCALE * np.log(np.minimum(np.fmax(one, LOWEST), 1).astype(np.float64)) + OFFSET
        left = place.astype(np.int64)
        cell = left + ROW * np.minimum(depth.numpy(), DEPTHS)
        low = self._low[cell]
        chance = low + (self._high[cell] - low) * (place - left)
        return torch.from_numpy(np.where(one > 0, chance, 0.0))

    def observe(self, value: Sequence[float], depth: Sequence[int], accepted: Sequence[bool]) -> None:
        """Nodes [M] that were verified, and which of them were accepted."""
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
        """What `to_json` gave. Raises ValueError, and changes nothing, where `data` is something else."""
        count = len(self.hits)
        trials = numbers(member(data, "trials"), count, least=1e-3)
        hits = numbers(member(data, "hits"), count)
        if any(hit > 1.001 * trial for hit, trial in zip(hits, trials, strict=True)):  # six digits were written
            raise ValueError("more nodes were accepted than verified")
        self.hits, self.trials = array("d", hits), array("d", trials)
        for depth in range(1, 1 + DEPTHS):
            self._settle(depth)


def _rising(hits: Sequence[float], trials: Sequence[float]) -> list[float]:
    """The ratios of `hits` to `trials`, pooled with their neighbours where they would fall (isotonic regression): a
    running maximum would believe every lucky bin, and promise too much."""
    pools: list[tuple[float, float, int]] = []
    for hit, trial in zip(hits, trials, strict=True):
        count = 1
        while pools and pools[-1][0] * trial >= hit * pools[-1][1]:
            more_hits, more_trials, more = pools.pop()
            hit, trial, count = hit + more_hits, trial + more_trials, count + more
        pools.append((hit, trial, count))
    return [hit / trial for hit, trial, count in pools for _ in range(count)]
