"""Loops over the bins of a `Calibration`, and over nodes."""

# mypy: disable-error-code="untyped-decorator"

import math

import numpy as np

from vllm_adaptive_tree.compiled import njit

DEPTHS, BINS = 16, 24
LOWEST = 1e-4
"""Value below which nodes are useless and share a bin."""
MEMORY = 300.0
"""Observations of a bin after which an old one has weight 1/e."""
LEAST = 0.1
"""Observations that count in any bin."""
SCALE, OFFSET = -BINS / math.log(LOWEST), BINS + 0.5
"""SCALE * log(value) + OFFSET: the position of a value among the centres of bins 1 to BINS."""

TABLE = "float64[:, ::1]"
"""Type of a table [1 + 2 * DEPTHS, BINS + 2]: depths of drafted nodes, then those of look-ups."""


@njit("int64(int64)")
def _row(depth):  # type: ignore[no-untyped-def]
    """Row of a depth, which is negative for a look-up's node."""
    return min(depth, DEPTHS) if depth >= 0 else DEPTHS + min(-depth, DEPTHS)


@njit("float64(float64)")
def _place(value):  # type: ignore[no-untyped-def]
    """Position among the bins' centres; NaN counts as the lowest."""
    value = min(value, 1.0) if value > LOWEST else LOWEST
    return SCALE * math.log(value) + OFFSET


@njit(f"float64({TABLE}, float64, int64)")
def _chance(chance, place, row):  # type: ignore[no-untyped-def]
    left = int(place)
    low = chance[row, left]
    return low + (chance[row, left + 1] - low) * (place - left)


@njit(f"void({TABLE}, float64[::1], int64[::1], float64[::1])")
def chances(chance, value, depth, out):  # type: ignore[no-untyped-def]
    """Acceptance probabilities `out` [M] of nodes; 0 where the value is 0 or NaN."""
    for node in range(len(value)):
        row = _row(depth[node])
        out[node] = _chance(chance, _place(value[node]), row) if value[node] > 0 else 0.0


@njit("void(float64[::1], float64[::1], float64[::1])")
def _settle(hits, trials, chance):  # type: ignore[no-untyped-def]
    """Ratios hits / trials of one depth, pooled with neighbours where they would decrease (isotonic regression).

    A running maximum would trust every lucky bin and predict too much.
    """
    hit, trial, first, pools = np.empty(BINS), np.empty(BINS), np.empty(BINS + 1, np.int64), 0
    for place in range(BINS):
        hit[pools], trial[pools], first[pools] = hits[1 + place], trials[1 + place], place
        while pools > 0 and hit[pools - 1] * trial[pools] >= hit[pools] * trial[pools - 1]:
            pools -= 1
            hit[pools] += hit[pools + 1]
            trial[pools] += trial[pools + 1]
        pools += 1
    first[pools] = BINS
    for pool in range(pools):
        chance[1 + first[pool] : 1 + first[pool + 1]] = hit[pool] / trial[pool]
    chance[1 + BINS] = chance[BINS]


@njit(f"void({TABLE}, {TABLE}, {TABLE})")
def settle(hits, trials, chance):  # type: ignore[no-untyped-def]
    """Fill `chance` of all depths."""
    for row in range(1, 1 + 2 * DEPTHS):
        _settle(hits[row], trials[row], chance[row])


@njit(f"UniTuple(float64, 2)({TABLE}, {TABLE}, {TABLE}, float64[::1], int64[::1], boolean[::1])")
def observe(hits, trials, chance, value, depth, accepted):  # type: ignore[no-untyped-def]
    """Add nodes [M] to the tables; returns how many were expected to be accepted, and how many were."""
    new_hits, new_trials = np.zeros_like(hits), np.zeros_like(trials)
    expected, observed = 0.0, 0.0
    for node in range(len(value)):
        row, place = _row(depth[node]), _place(value[node])
        if value[node] > 0:
            expected += _chance(chance, place, row)
        cell = min(int(place + 0.5), BINS)
        new_trials[row, cell] += 1
        if accepted[node]:
            new_hits[row, cell] += 1
            observed += 1
    for row in range(1 + 2 * DEPTHS):
        total = new_trials[row].sum()
        if total == 0:
            continue
        for cell in range(BINS + 2):
            # empty bins fade too, more slowly, or their priors would be averaged in for ever
            fade = math.exp(-(new_trials[row, cell] + total / 4) / MEMORY)
            fade = max(fade, LEAST / trials[row, cell])
            trials[row, cell] = trials[row, cell] * fade + new_trials[row, cell]
            hits[row, cell] = hits[row, cell] * fade + new_hits[row, cell]
        if row > 0:
            _settle(hits[row], trials[row], chance[row])
    return expected, observed
