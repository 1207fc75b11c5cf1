"""Medians over rounds with bootstrap intervals, and ratios of interleaved rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

MIN_ROUNDS = 5
"""Fewest rounds for a ratio."""
RESAMPLES = 4000
SEED = 0
LOW, HIGH = 0.05, 0.95  # a 90 % interval

ByRound = Mapping[int, float]  # number of the round -> its value


class Estimate(NamedTuple):
    median: float  # of the rounds, or that of their totals
    low: float  # 90 % bootstrap interval over rounds
    high: float
    rounds: int


def row_to_json(row: Any) -> dict[str, Any]:
    """JSON of a dataclass with estimates in its fields."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    return {name: value._asdict() if isinstance(value, Estimate) else value for name, value in values.items()}


def median(values: ByRound) -> Estimate | None:
    """Median of the rounds; None without a value. From fewer rounds than MIN_ROUNDS the interval is their range."""
    if not values:
        return None
    seen = np.array(list(values.values()), dtype=float)
    if len(seen) < MIN_ROUNDS:
        return Estimate(float(np.median(seen)), float(seen.min()), float(seen.max()), len(seen))
    return _estimate(seen, _medians(seen, SEED))


def ratio(above: ByRound, below: ByRound) -> Estimate | None:
    """Median of the ratios of rounds with the same number; None from fewer than MIN_ROUNDS."""
    shared = sorted(above.keys() & below.keys())
    if len(shared) < MIN_ROUNDS:
        return None
    pairs = np.array([above[number] / below[number] for number in shared])
    return _estimate(pairs, _medians(pairs, SEED))


def total(speeds: ByRound) -> Estimate | None:
    """Speed of rounds of equal work one after the other; None without a value. Otherwise as `median`."""
    if not speeds:
        return None
    times = 1 / np.array(list(speeds.values()), dtype=float)
    if len(times) < MIN_ROUNDS:
        return Estimate(float(1 / times.mean()), float(1 / times.max()), float(1 / times.min()), len(times))
    return Estimate(float(1 / times.mean()), *_interval(1 / _resampled(times, SEED).mean(-1)), len(times))


def total_ratio(above: ByRound, below: ByRound) -> Estimate | None:
    """Ratio of the totals of rounds with the same number; None from fewer than MIN_ROUNDS. Where each round has a
    prompt of its own, this is what one waits for; the median of their ratios is that of a typical prompt."""
    shared = sorted(above.keys() & below.keys())
    if len(shared) < MIN_ROUNDS:
        return None
    times = 1 / np.array([[values[number] for number in shared] for values in (above, below)], dtype=float)
    ours, theirs = times.mean(-1)
    resampled = _resampled(times, SEED).mean(-1)
    return Estimate(float(theirs / ours), *_interval(resampled[1] / resampled[0]), len(shared))


def ratio_through(above: ByRound, above_base: ByRound, below: ByRound, below_base: ByRound) -> Estimate | None:
    """Ratio of two series that never ran side by side: of their ratios to the base of their own rounds."""
    ratios = []
    for values, base in ((above, above_base), (below, below_base)):
        shared = sorted(values.keys() & base.keys())
        if len(shared) < MIN_ROUNDS:
            return None
        ratios.append(np.array([values[number] / base[number] for number in shared]))
    resampled = _medians(ratios[0], SEED) / _medians(ratios[1], SEED + 1)
    value = float(np.median(ratios[0]) / np.median(ratios[1]))
    return Estimate(value, *_interval(resampled), min(map(len, ratios)))


def percentile(values: Sequence[float], quantile: float) -> float | None:
    return float(np.quantile(np.array(values), quantile)) if len(values) else None


def _estimate(seen: np.ndarray, resampled: np.ndarray) -> Estimate:
    return Estimate(float(np.median(seen)), *_interval(resampled), len(seen))


def _interval(resampled: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(resampled, [LOW, HIGH])
    return float(low), float(high)


def _medians(values: np.ndarray, seed: int) -> np.ndarray:
    """Medians of RESAMPLES samples with replacement."""
    return np.asarray(np.median(_resampled(values, seed), axis=-1))


def _resampled(values: np.ndarray, seed: int) -> np.ndarray:
    """RESAMPLES samples of the n rounds [.., n] with replacement, [.., RESAMPLES, n]."""
    rounds = values.shape[-1]
    return values[..., np.random.default_rng(seed).integers(rounds, size=(RESAMPLES, rounds))]
