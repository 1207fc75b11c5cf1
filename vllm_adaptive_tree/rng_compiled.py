"""`CounterRNG`'s numbers in compiled loops."""

import numpy as np

from vllm_adaptive_tree.compiled import njit

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
def uniform(key, place, number):  # type: ignore[no-untyped-def]
    """The uniform number of that `number` in the stream `key` folded with `place`: 2 of the first trial, 3 of the first
    sample, 4 of the second trial, .."""
    bits = _mix(_mix(key + _mix(place)) + number) >> 11 & WORD
    return bits * 2.0**-53
