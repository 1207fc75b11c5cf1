"""Nodes that one curve of trees saves against another at equal acceptance, between measured points only."""

from collections.abc import Sequence

import numpy as np

from benchmarks.papers.bootstrap import Estimate, Record, interval, ratios, weights

Curve = Sequence[Record]
"""The same trees at several sizes."""


def nodes_saved(ours: Sequence[Curve], theirs: Sequence[Curve], at: Record) -> Estimate:
    """Share of the nodes per step that `ours` saves against `theirs` at the tokens per step of `at`.

    Nodes are interpolated linearly in their logarithm within each resample, never extrapolated: above its largest trees
    a curve has not reached the acceptance (nodes without end: -inf, if it is ours), below its smallest ones it counts
    as these. Without a curve on either side nothing has: -inf.

    Args:
        ours, theirs: one curve per training; a resample draws trainings too, and takes the geometric mean of their
            nodes.
    """
    if not ours or not theirs:
        return Estimate(-np.inf, -np.inf, -np.inf)
    count = min(len(one["file"]) for curve in (*ours, *theirs, [at]) for one in curve)
    drawn = weights(at["file"][:count])
    wanted = ratios(at, drawn)
    nodes = [_mean([_log_nodes(curve, wanted, drawn) for curve in curves]) for curves in (ours, theirs)]
    with np.errstate(over="ignore", invalid="ignore"):
        saved = np.nan_to_num(1 - np.exp(nodes[0] - nodes[1]), nan=-np.inf, neginf=-np.inf)
    return Estimate(float(saved[0]), *interval(saved[1:]))


def _mean(trainings: list[np.ndarray]) -> np.ndarray:
    """Of [trainings, B]: all of them in the first column, as many with replacement in the others."""
    found, count = np.stack(trainings), len(trainings)
    drawn = np.random.default_rng(1).integers(count, size=(count, found.shape[1]))
    drawn[:, 0] = np.arange(count)
    return np.asarray(np.take_along_axis(found, drawn, 0).mean(0))


def _log_nodes(curve: Curve, wanted: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    points = [(ratios(one, drawn), np.log(ratios(one, drawn, "nodes"))) for one in curve]
    found = []
    for row, target in enumerate(wanted):
        tokens, nodes = np.array(sorted((t[row], n[row]) for t, n in points)).T
        found.append(np.interp(target, tokens, nodes, right=np.inf if target > tokens[-1] + 1e-9 else nodes[-1]))
    return np.array(found)
