"""First difference of two texts, and distances of 16-bit numbers."""

import math
from typing import Any

BITS = {"bfloat16": 8, "float16": 11}
"""Bits of the significand."""


def first_difference(ours: Any, theirs: Any) -> int | None:
    """Index of the first token that differs between two outputs of one length; None: they are the same."""
    pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
    return next((at for at, (here, there) in pairs if here != there), None)


def ulp(value: float, dtype: str) -> float:
    """Distance to the next number of this kind."""
    return 2.0 ** (math.frexp(abs(value))[1] - BITS[dtype])


def gap(output: Any, at: int, dtype: str) -> float:
    """Distance between the best and the second logit of a token, in units of the best's last place; needs `logprobs=2`
    of an engine with `logprobs_mode="raw_logits"`."""
    best, second = sorted((entry.logprob for entry in output.logprobs[at].values()), reverse=True)[:2]
    return (best - second) / ulp(best, dtype)
