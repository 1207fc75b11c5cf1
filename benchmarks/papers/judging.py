"""Is A at least B? Judged by a paired bootstrap over the prompts that both decoded."""

from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.papers.decoding import Record

RESAMPLES = 2000
Verdict = Literal["holds", "within noise", "does not hold"]


class Estimate(NamedTuple):
    mean: float
    low: float  # 95 % bootstrap interval over prompts
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {(self.high - self.low) / 2:.2f}"

    def less(self, amount: float) -> "Estimate":
        return Estimate(*(value - amount for value in self))

    def percent(self) -> str:
        return "not reached" if self.mean < -3 else f"{self.mean:+.0%} [{self.low:+.0%}, {self.high:+.0%}]"


class Claim(NamedTuple):
    text: str
    verdict: Verdict
    figures: str
    reason: str  # shown unless it holds


def ratio(record: Record, above: str = "tokens", below: str = "steps") -> Estimate:
    """`above` per `below`, over all prompts together."""
    values = _resampled(record, above, below, len(record["steps"]))
    return Estimate(sum(record[above]) / sum(record[below]), *_interval(values))


def difference(a: Record, b: Record, above: str = "tokens", below: str = "steps") -> Estimate:
    """The ratio of `a` less that of `b`, both over the prompts that they share (the first ones)."""
    count = min(len(a["steps"]), len(b["steps"]))
    values = _resampled(a, above, below, count) - _resampled(b, above, below, count)
    means = [sum(one[above][:count]) / sum(one[below][:count]) for one in (a, b)]
    return Estimate(means[0] - means[1], *_interval(values))


def nodes_saved(ours: list[Record], theirs: list[Record], at: Record) -> Estimate:
    """Share of the nodes per step that the curve `ours` saves against `theirs` at the tokens per step of `at`.

    Nodes are interpolated (beyond the ends: extrapolated) linearly in their logarithm, within each resample.
    """
    count = len(at["steps"])
    weights = np.vstack([np.ones(count), _weights(count)])  # the first row: all prompts once
    wanted = _ratios(at, weights, "tokens")
    nodes = [
        _nodes_at(wanted, [(_ratios(x, weights, "tokens"), _ratios(x, weights, "nodes")) for x in curve])
        for curve in (ours, theirs)
    ]
    saved = 1 - nodes[0] / nodes[1]
    return Estimate(float(saved[0]), *_interval(saved[1:]))


MOST_NODES = 1e4


def _nodes_at(wanted: np.ndarray, curve: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    found = []
    for row, target in enumerate(wanted):
        points = sorted((float(tokens[row]), float(np.log(nodes[row]))) for tokens, nodes in curve)
        tokens, nodes = np.array(points).T
        tokens = np.maximum.accumulate(tokens + 1e-9 * np.arange(len(tokens)))
        place = int(np.clip(np.searchsorted(tokens, target), 1, len(tokens) - 1))
        slope = (nodes[place] - nodes[place - 1]) / max(tokens[place] - tokens[place - 1], 1e-9)
        value = nodes[place - 1] + slope * (target - tokens[place - 1])
        found.append(np.exp(np.clip(value, 0, np.log(MOST_NODES))))
    return np.array(found)


def _ratios(record: Record, weights: np.ndarray, above: str) -> np.ndarray:
    count = weights.shape[1]
    top, bottom = (np.asarray(record[name][:count], dtype=float) for name in (above, "steps"))
    return (weights @ top) / (weights @ bottom)


def pooled(pairs: list[tuple[Record, Record]]) -> Estimate:
    """The mean difference in tokens per step over several pairs of cells, resampled together."""
    count = min(len(one["steps"]) for pair in pairs for one in pair)
    values = [_resampled(a, "tokens", "steps", count) - _resampled(b, "tokens", "steps", count) for a, b in pairs]
    mean = float(np.mean([difference(a, b).mean for a, b in pairs]))
    return Estimate(mean, *_interval(np.mean(values, 0)))


def judge(text: str, gain: Estimate, reason: str = "", *, shown: str = "") -> Claim:
    """`gain` should be positive; an interval around 0 is noise."""
    verdict: Verdict = "holds" if gain.low > 0 else "does not hold" if gain.high < 0 else "within noise"
    return Claim(text, verdict, shown or f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]", reason)


def judge_fact(text: str, holds: bool, figures: str, reason: str = "") -> Claim:
    return Claim(text, "holds" if holds else "does not hold", figures, reason)


def bootstrap_mean(values: Any) -> Estimate:
    """Of one number per prompt or place."""
    values = np.asarray(values, dtype=float)
    return Estimate(float(values.mean()), *_interval(_weights(len(values)) @ values / len(values)))


def _resampled(record: Record, above: str, below: str, count: int) -> np.ndarray:
    weights = _weights(count)
    top, bottom = (np.asarray(record[name][:count], dtype=float) for name in (above, below))
    return (weights @ top) / np.maximum(weights @ bottom, 1e-9)


def _weights(count: int) -> np.ndarray:
    """How often each prompt is in each resample; the same for every record."""
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES).astype(float)


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
