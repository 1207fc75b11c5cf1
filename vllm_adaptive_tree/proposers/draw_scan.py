"""Draws without replacement from a scanned row: `CounterRNG.sample_without_replacement`, compiled."""

import numpy as np

from vllm_adaptive_tree.compiled import njit
from vllm_adaptive_tree.proposers.row_scan import CHUNK, SCAN, chunk_of, weights_of
from vllm_adaptive_tree.rng import EXHAUSTED

WORD = (1 << 53) - 1


@njit()
def _mix(x):  # type: ignore[no-untyped-def]
    """As `rng._mix`."""
    x = x + np.int64(-7046029254386353131)
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * np.int64(-4658895280553007687)
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * np.int64(-7723592293110705685)
    return x ^ (x >> 31 & (1 << 33) - 1)


@njit()
def key_of(seed, place):  # type: ignore[no-untyped-def]
    """As `CounterRNG.key`; `place`: position and purpose in one number."""
    return _mix(_mix(seed) + place)


@njit()
def _uniform(key, place, number):  # type: ignore[no-untyped-def]
    """The uniform number of the `number`-th sample, from 1, of the stream `key` folded with `place`."""
    bits = _mix(_mix(key + _mix(place)) + 2 * number + 1) >> 11 & WORD
    return bits * 2.0**-53


@njit()
def _inverted(masses, target):  # type: ignore[no-untyped-def]
    """First index with a cumulated mass above `target`, else the last one with any; and the mass before it."""
    before, last, reached = 0.0, 0, 0.0
    for at in range(len(masses)):
        if masses[at] > 0:
            if before + masses[at] > target:
                return at, before
            last, reached = at, before
        before += masses[at]
    return last, reached


@njit(f"Tuple((int64, float32))({SCAN}, int64, float64[::1], int64, int64, int64[::1], float32[::1], float32[::1])")
def draw(scan, row, sums, key, place, drawn, wide, weights):  # type: ignore[no-untyped-def]
    """The next token and its logit; -1 once no mass is left.

    Args:
        sums: [C] weights of the row's chunks without the tokens `drawn` so far; updated.
        key, place: of the stream, as in `rng.fold_in`.
        wide, weights: [CHUNK], buffers.
    """
    logits, bits, scale, shift, _, _, total = scan
    mass = sums.sum()
    if not mass > EXHAUSTED * total[row]:
        return -1, np.float32(0)
    target = mass * _uniform(key, place, len(drawn) + 1)
    chunk, before = _inverted(sums, target)
    part = chunk_of(logits, bits, row, chunk, wide)
    weights = weights[: len(part)]
    weights_of(part, scale[row], shift[row], weights)
    for token in drawn:
        if token // CHUNK == chunk:
            weights[token % CHUNK] = 0
    at, _ = _inverted(weights, max(target - before, 0.0))
    weights[at] = 0
    sums[chunk] = weights.sum()
    return chunk * CHUNK + at, part[at]
