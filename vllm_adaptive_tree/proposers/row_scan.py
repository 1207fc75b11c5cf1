"""One pass over a draft's logits on a CPU: what a proposer needs to find the tokens that matter in a row.

A softmax reads and writes its rows several times. Here a row is read once, in chunks that stay in the cache; later only
the few chunks that hold the best tokens, or the drawn ones, are read again.
"""

# mypy: disable-error-code="untyped-decorator"

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_adaptive_tree.compiled import njit
from vllm_adaptive_tree.drafters import Rows

CHUNK = 256
"""Entries of which the largest and the sum are kept."""
LANES = 32
"""Entries compared at once: a short loop is vectorised."""
LN2 = math.log(2)
LEAST, JUMP = np.float32(-126), np.float32(60)
"""Binary logarithms of the least weight, and of one that may still be added up relative to an earlier reference."""
NOTHING = np.float32(-1e30)
"""Best entry of a row until one is known."""
C0, C1, C2, C3, C4, C5 = map(np.float32, (1.00000008, 0.69314721, 0.24022107, 0.05550327, 0.00967604, 0.00134004))
"""2 ** f for |f| <= 1/2, to 1e-7."""


class Scan(NamedTuple):
    """R * W rows of V logits, in C chunks.

    The weight of a token is 2 ** (logit * scale - shift), and its probability that over the `total` of its row.
    """

    logits: NDArray[np.float32]  # [R * W, V], or empty and
    bits: NDArray[np.uint16]  # [R * W, V] of bfloat16
    scale: NDArray[np.float32]  # [R * W]
    shift: NDArray[np.float32]  # [R * W]
    maxima: NDArray[np.float32]  # [R * W, C]: largest logits
    sums: NDArray[np.float32]  # [R * W, C]: of weights
    total: NDArray[np.float64]  # [R * W]


def scan(rows: Rows, temperature: Tensor, used: Tensor | None) -> tuple[Rows, Tensor]:
    """As `Proposer.check`; the rows get a `Scan`. Rows that are not `used` count as dead."""
    requests, width, vocabulary = rows.logits.shape
    flat = rows.logits.reshape(-1, vocabulary).contiguous()
    logits, bits = NO_LOGITS, NO_BITS
    if flat.dtype == torch.bfloat16:
        bits = flat.view(torch.uint16).numpy()
    else:
        logits = flat.float().numpy()
    count, chunks = requests * width, -(-vocabulary // CHUNK)
    scale, maxima = np.empty((2, count), np.float32), np.empty((2, count, chunks), np.float32)
    found = Scan(logits, bits, scale[0], scale[1], maxima[0], maxima[1], np.zeros(count))
    dead, broken = np.zeros((2, requests, width), dtype=bool)
    for unread in (rows.dead, None if used is None else ~used):
        if unread is not None:
            dead |= unread.numpy()
    if _scan(tuple(found), temperature.float().numpy(), dead, broken):
        rows.logits.masked_fill_(torch.from_numpy(broken)[..., None], 0.0)
    return rows._replace(dead=torch.from_numpy(dead), scan=found), torch.from_numpy(broken)


NO_LOGITS, NO_BITS = np.empty((0, 0), np.float32), np.empty((0, 0), np.uint16)
_FIELDS = "float32[:, ::1], uint16[:, ::1], float32[::1], float32[::1], float32[:, ::1], float32[:, ::1], float64[::1]"
SCAN = f"Tuple(({_FIELDS}))"
"""Type of a `Scan`. Signatures make numba compile at import, not within a step."""


@njit("float32[::1](float32[:, ::1], uint16[:, ::1], int64, int64, float32[::1])")
def chunk_of(logits, bits, row, chunk, wide):  # type: ignore[no-untyped-def]
    """Logits of a chunk: float32, in place, or in the buffer `wide` [CHUNK]."""
    start = chunk * CHUNK
    if len(bits):
        part = bits[row, start : start + CHUNK]
        whole = wide.view(np.int32)
        for at in range(len(part)):
            whole[at] = np.int32(part[at]) << np.int32(16)
        return wide[: len(part)]
    return logits[row, start : start + CHUNK]


@njit(fastmath={"contract"})
def _weight(logit, scale, shift):  # type: ignore[no-untyped-def]
    """2 ** (logit * scale - shift), at least 2 ** LEAST; NaN stays."""
    power = logit * scale - shift
    power = LEAST if power < LEAST else power
    whole = np.int32(power + np.float32(126.5))
    part = power - np.float32(np.int32(whole - np.int32(126)))
    factor = ((((C5 * part + C4) * part + C3) * part + C2) * part + C1) * part + C0
    return factor * np.int32(np.int32(whole + np.int32(1)) << np.int32(23)).view(np.float32)


@njit("void(float32[::1], float32, float32, float32[::1])")
def weights_of(part, scale, shift, out):  # type: ignore[no-untyped-def]
    """Weights of logits, exactly 0 where they are negligible, into `out`."""
    for at in range(len(part)):
        weight = _weight(part[at], scale, shift)
        out[at] = np.float32(0) if part[at] * scale - shift <= LEAST else weight


@njit(fastmath={"reassoc", "nsz"})
def _largest_and_sum(part, scale, shift):  # type: ignore[no-untyped-def]
    """Largest logit and sum of weights; it is compared as an integer, which vector units do without regard to NaN."""
    largest, total = np.int32(-(1 << 31)), np.float32(0)
    for at in range(len(part)):
        logit = np.float32(part[at])
        order = logit.view(np.int32)
        order = np.int32(order ^ ((order >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        largest = np.int32(order if order > largest else largest)
        total += _weight(logit, scale, shift)
    largest = np.int32(largest ^ ((largest >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return largest.view(np.float32), total


@njit(f"int64({SCAN}, float32[:], boolean[:, ::1], boolean[:, ::1])")
def _scan(scan, temperature, dead, broken):  # type: ignore[no-untyped-def]
    """Fill a `Scan` but for its logits, of the rows [R, W] that are not `dead`; returns the number of those that are
    found to be so, and marks them `broken` too."""
    logits, bits, scale, shift, maxima, sums, total = scan
    wide, chunks, found = np.empty(CHUNK, np.float32), maxima.shape[1], 0
    then = np.empty(chunks, np.float32)  # reference of each sum
    for row in range(len(scale)):
        request, column = row // dead.shape[1], row % dead.shape[1]
        if dead[request, column]:
            continue
        scale[row] = np.float32(1 / LN2) / temperature[request]
        factor, last, mass = scale[row], 0, 0.0
        begin = chunk_of(logits, bits, row, 0, wide)[0]
        best = begin if begin > NOTHING else NOTHING
        reference = best * factor
        for chunk in range(chunks):
            part = chunk_of(logits, bits, row, chunk, wide)
            largest, one = _largest_and_sum(part, factor, reference)
            if largest > best:
                higher = largest * factor
                rise = np.float64(higher) - np.float64(reference)  # of the rounded references, which weights are of
                if rise > JUMP:
                    largest, one = _largest_and_sum(part, factor, higher)
                else:
                    one *= np.float32(2.0**-rise)
                mass *= 2.0**-rise
                best, reference, last = largest, higher, chunk
            maxima[row, chunk], sums[row, chunk], then[chunk] = largest, one, reference
            mass += one
        for chunk in range(last):
            if then[chunk] != reference:
                sums[row, chunk] *= np.float32(2.0 ** (np.float64(then[chunk]) - np.float64(reference)))
        shift[row] = reference
        total[row] = mass
        if not (np.isfinite(shift[row]) and np.isfinite(mass) and best > NOTHING):
            dead[request, column] = broken[request, column] = True
            found += 1
    return found


SLACK = np.float32(1e-5)
"""Relative distance below a bound at which an entry is still looked at: bounds are rounded."""


@njit(f"int64({SCAN}, int64, float64, int64[::1], float32[::1])")
def best_entries(scan, row, least, tokens, logits):  # type: ignore[no-untyped-def]
    """The largest logits of a row above `least`, at most as many as the arrays hold, by descending logit, the smaller
    token first; returns their number."""
    rows, bits, _, _, maxima, _, _ = scan
    wide, n, found = np.empty(CHUNK, np.float32), len(tokens), 0
    bound = np.float32(-np.inf)
    if least > -np.inf:
        bound = np.float32(least - SLACK * abs(least))
    for chunk in range(maxima.shape[1]):
        if not maxima[row, chunk] > bound:
            continue
        part = chunk_of(rows, bits, row, chunk, wide)
        for start in range(0, len(part), LANES):
            some = part[start : start + LANES]
            hit = np.int32(0)
            for at in range(len(some)):
                hit |= np.int32(some[at] > bound)
            if not hit:
                continue
            for one in range(len(some)):
                new = some[one]
                if not new > bound:
                    continue
                found = min(found + 1, n)
                at = found - 1
                while at > 0 and logits[at - 1] < new:
                    logits[at], tokens[at] = logits[at - 1], tokens[at - 1]
                    at -= 1
                logits[at], tokens[at] = new, chunk * CHUNK + start + one
                if found == n:
                    bound = max(bound, logits[n - 1])
    return found


@njit(fastmath={"nnan", "nsz", "reassoc"})
def _largest_below(part, bound):  # type: ignore[no-untyped-def]
    """The largest entry less than `bound`."""
    largest = np.float32(-np.inf)
    for at in range(len(part)):
        value = part[at] if part[at] < bound else np.float32(-np.inf)
        largest = max(largest, value)
    return largest


@njit(f"Tuple((int64, float32))({SCAN}, int64, float32[::1], int64, float32, float32[::1])")
def next_best(scan, row, maxima, token, logit, wide):  # type: ignore[no-untyped-def]
    """The best token of a row after `token` and its `logit`, and its own; of equals the smaller token; -1 if there is
    none.

    Args:
        maxima: [C] largest logits of the row's chunks, those up to `token` left out; updated.
        wide: [CHUNK], a buffer.
    """
    chunk = np.argmax(maxima)
    best = maxima[chunk]
    part = chunk_of(scan[0], scan[1], row, chunk, wide)
    if best == -np.inf:
        return -1, best
    at = token % CHUNK + 1 if best == logit and token // CHUNK == chunk else 0
    while part[at] != best:
        at += 1
    after = at + 1
    while after < len(part) and part[after] != best:
        after += 1
    maxima[chunk] = best if after < len(part) else _largest_below(part, best)
    return chunk * CHUNK + at, best


@njit(f"float32({SCAN}, int64, float32)")
def probability(scan, row, logit):  # type: ignore[no-untyped-def]
    """Probability of a token."""
    return np.float32(min(2.0 ** (np.float64(logit) * scan[2][row] - scan[3][row]) / scan[6][row], 1.0))
