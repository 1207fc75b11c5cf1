"""Medians with bootstrap intervals over rounds, and ratios of rounds that ran side by side."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

ENOUGH = 5
"""Rounds; no ratio is given from fewer."""
RESAMPLES = 4000
SEED = 0
LOW, HIGH = 0.05, 0.95  # a 90 % interval

Rounds = Mapping[int, float]  # number of the round -> its value


class Estimate(NamedTuple):
    median: float
    low: float  # 90 % bootstrap interval over rounds
    high: float
    rounds: int


def median(values: Rounds) -> Estimate | None:
    """None without a value; from fewer rounds than ENOUGH the interval is what was seen."""
    if not values:
        return None
    seen = np.array(list(values.values()), dtype=float)
    if len(seen) < ENOUGH:
        return Estimate(float(np.median(seen)), float(seen.min()), float(seen.max()), len(seen))
    return _estimate(seen, _medians(seen, SEED))


def ratio(above: Rounds, below: Rounds) -> Estimate | None:
    """Of the rounds that both have, pair by pair; None from fewer than ENOUGH."""
    shared = sorted(above.keys() & below.keys())
    if len(shared) < ENOUGH:
        return None
    pairs = np.array([above[number] / below[number] for number in shared])
    return _estimate(pairs, _medians(pairs, SEED))


def ratio_through(above: Rounds, above_base: Rounds, below: Rounds, below_base: Rounds) -> Estimate | None:
    """Of two that never ran side by side: each against the base of its own rounds, then one by the other."""
    ratios = []
    for values, base in ((above, above_base), (below, below_base)):
        shared = sorted(values.keys() & base.keys())
        if len(shared) < ENOUGH:
            return None
        ratios.append(np.array([values[number] / base[number] for number in shared]))
    resampled = _medians(ratios[0], SEED) / _medians(ratios[1], SEED + 1)
    value = float(np.median(ratios[0]) / np.median(ratios[1]))
    return Estimate(value, *_interval(resampled), min(map(len, ratios)))


def percentile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(np.array(values), share)) if len(values) else None


def _estimate(seen: np.ndarray, resampled: np.ndarray) -> Estimate:
    return Estimate(float(np.median(seen)), *_interval(resampled), len(seen))


def _interval(resampled: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(resampled, [LOW, HIGH])
    return float(low), float(high)


def _medians(values: np.ndarray, seed: int) -> np.ndarray:
    """Of RESAMPLES samples with replacement."""
    drawn = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    return np.asarray(np.median(values[drawn], axis=1))
