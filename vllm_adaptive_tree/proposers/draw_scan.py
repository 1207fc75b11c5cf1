"""Draws without replacement from a scanned row: `CounterRNG.sample_without_replacement`, compiled."""

import numpy as np

from vllm_adaptive_tree.compiled import njit
from vllm_adaptive_tree.proposers.row_scan import CHUNK, SCAN, chunk_of, weights_of
from vllm_adaptive_tree.rng import EXHAUSTED
from vllm_adaptive_tree.rng_compiled import uniform


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
    target = mass * uniform(key, place, 2 * len(drawn) + 3)
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
