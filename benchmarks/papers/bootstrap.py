"""Means and intervals of what was measured, by resampling files.

Prompts are cuts of a few files, and cuts of one file are alike. So a resample draws files, each with all its prompts.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

Record = dict[str, list[Any]]
"""Of `decoding.measure`; `file`: which file each prompt is from."""

RESAMPLES = 2000


class Estimate(NamedTuple):
    mean: float
    low: float  # 95 % bootstrap interval over files
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {(self.high - self.low) / 2:.2f}"

    @property
    def resolution(self) -> float:
        """The smallest difference that would have been told from 0."""
        return (self.high - self.low) / 2

    def signed(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    def percent(self) -> str:
        """Of a share that may not have been reached: -inf."""
        return f"{_share(self.mean)} [{_share(self.low)}, {_share(self.high)}]"


def merged(records: Sequence[Record]) -> Record:
    """One record of the same prompts decoded with several sets of random numbers."""
    found: Record = {"file": records[0]["file"]}
    for name in records[0]:
        if name == "each":
            found[name] = [pair for one in records for pair in one[name]]
        elif name != "file":
            found[name] = [sum(values) for values in zip(*(one[name] for one in records), strict=True)]
    return found


def ratio(record: Record, above: str = "tokens", below: str = "steps") -> Estimate:
    """`above` per `below`, over all prompts together."""
    values = ratios(record, weights(record["file"]), above, below)
    return Estimate(float(values[0]), *interval(values[1:]))


def difference(a: Record, b: Record, above: str = "tokens", below: str = "steps") -> Estimate:
    """The ratio of `a` less that of `b`, both over the prompts that they share (the first ones)."""
    return pooled([(a, b)], above, below)


def pooled(pairs: Sequence[tuple[Record, Record]], above: str = "tokens", below: str = "steps") -> Estimate:
    """The mean difference over several pairs of cells, resampled together."""
    count = min(len(one["file"]) for pair in pairs for one in pair)
    drawn = weights(pairs[0][0]["file"][:count])
    values = np.mean([ratios(a, drawn, above, below) - ratios(b, drawn, above, below) for a, b in pairs], 0)
    return Estimate(float(values[0]), *interval(values[1:]))


def relative(a: Record, b: Record, above: str = "tokens", below: str = "steps") -> Estimate:
    """The ratio of `a` over that of `b`, less 1, over the prompts that they share (the first ones)."""
    drawn = weights(a["file"][: min(len(one["file"]) for one in (a, b))])
    values = ratios(a, drawn, above, below) / ratios(b, drawn, above, below) - 1
    return Estimate(float(values[0]), *interval(values[1:]))


def costed(record: Record, mu: float) -> Record:
    """With `cost`: what its steps take in target forwards, a draft forward being `mu` of one."""
    return record | {"cost": [steps + mu * n for steps, n in zip(record["steps"], record["forwards"], strict=True)]}


def lead(some: Sequence[Record], others: Sequence[Record], below: str) -> Estimate:
    """Lead of the best of `some` over the best of the others in tokens per `below`; each resample has its own best."""
    drawn = weights(some[0]["file"])
    best = [np.max([ratios(one, drawn, "tokens", below) for one in records], 0) for records in (some, others)]
    values = best[0] - best[1]
    return Estimate(float(values[0]), *interval(values[1:]))


def mean(values: Sequence[float], files: Sequence[int]) -> Estimate:
    """Mean of one number per prompt."""
    drawn = weights(files)
    found = drawn @ np.asarray(values, dtype=float) / drawn.sum(1)
    return Estimate(float(found[0]), *interval(found[1:]))


def least_rise(hits: Sequence[Sequence[int]], counts: Sequence[Sequence[int]], files: Sequence[int]) -> Estimate:
    """The smallest step from one share hits / counts [prompts, bins] to the next; a resample has its own."""
    drawn = weights(files)
    shares = (drawn @ np.asarray(hits, dtype=float)) / np.maximum(drawn @ np.asarray(counts, dtype=float), 1)
    values = np.diff(shares, axis=1).min(1)
    return Estimate(float(values[0]), *interval(values[1:]))


def ratios(record: Record, drawn: np.ndarray, above: str = "tokens", below: str = "steps") -> np.ndarray:
    """One for every row of `drawn` [B, prompts], how often each prompt counts."""
    count = drawn.shape[1]
    top, bottom = (np.asarray(record[name][:count], dtype=float) for name in (above, below))
    return np.asarray((drawn @ top) / np.maximum(drawn @ bottom, 1e-9))


def weights(files: Sequence[int]) -> np.ndarray:
    """[1 + RESAMPLES, prompts]: how often each prompt counts; in the first row once, then in every resample."""
    return _weights(tuple(files))


@lru_cache(maxsize=16)
def _weights(files: tuple[int, ...]) -> np.ndarray:
    clusters, place = np.unique(files, return_inverse=True)
    chance = np.full(len(clusters), 1 / len(clusters))
    drawn = np.random.default_rng(0).multinomial(len(clusters), chance, size=RESAMPLES).astype(float)
    return np.vstack([np.ones(len(files)), drawn[:, place]])


def interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5], method="nearest")  # infinite ones cannot be averaged
    return float(low), float(high)


def _share(value: float) -> str:
    return "not reached" if value == -np.inf else f"{value:+.0%}"
