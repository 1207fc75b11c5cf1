"""Sampling with and without replacement, all draws of a row in one launch."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import math
from functools import cached_property
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.kernels.rng import mix, uniform
from vllm_adaptive_tree.rng import EXHAUSTED, CounterRNG
from vllm_adaptive_tree.vocab_ops import CHUNK, chunk_maxima, chunk_sums

FOLD_IN_BLOCK = 256  # keys per program
BELOW_ONE = 1 - 2.0**-53
"""Factor that gives the next smaller float64."""


@triton.jit
def pick(probs, left, drawn, u, vocabulary, chunks, CHUNK: tl.constexpr, BELOW_ONE: tl.constexpr):
    """Draw a token from a row of probabilities, of which `left` is the sum of each chunk without the tokens `drawn`.

    Returns:
        The token; what is left of its chunk without it; and where that chunk is.
    """
    index, lane = tl.arange(0, left.shape[0]), tl.arange(0, CHUNK)
    cdf = tl.cumsum(left, 0)
    total = tl.max(cdf, 0)
    target = tl.minimum(total * u, total * BELOW_ONE)
    chunk = tl.minimum(tl.sum((cdf <= target).to(tl.int32), 0), chunks - 1)
    here = index == chunk
    before = tl.sum(tl.where(here, cdf - left, 0.0), 0)
    token = chunk.to(tl.int64) * CHUNK + lane
    removed = tl.max((token[:, None] == drawn[None, :]).to(tl.int32), 1) != 0
    entry = tl.load(probs + token, mask=(token < vocabulary) & ~removed, other=0.0).to(tl.float64)
    inner = tl.cumsum(entry, 0)
    inside = tl.minimum(tl.maximum(target - before, 0.0), tl.max(inner, 0) * BELOW_ONE)
    at = tl.minimum(tl.sum((inner <= inside).to(tl.int32), 0), CHUNK - 1)
    found = tl.minimum(chunk.to(tl.int64) * CHUNK + at, vocabulary - 1)
    return found, tl.sum(tl.where(lane == at, 0.0, entry), 0), here


@triton.jit(do_not_specialize=["number", "k"], do_not_specialize_on_alignment=["key"])
def _sample(
    tokens,  # [rows, k]
    probs,  # [rows, V]
    sums,  # [rows, chunks] float64: sums of `probs` per chunk
    key,  # [rows]
    number,  # of the first draw's random number
    k,
    vocabulary,
    chunks,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,  # a power of two, as the next
    PADDED_K: tl.constexpr,
    EXHAUSTED: tl.constexpr,
    BELOW_ONE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index, column = tl.arange(0, PADDED_CHUNKS), tl.arange(0, PADDED_K)
    left = tl.load(sums + row * chunks + index, mask=index < chunks, other=0.0)
    exhausted = tl.sum(left, 0) * EXHAUSTED
    stream = tl.load(key + row)
    drawn = tl.full([PADDED_K], -1, tl.int64)
    for i in range(k):
        u = uniform(stream, number + 2 * i)
        token, rest, here = pick(probs + row * vocabulary, left, drawn, u, vocabulary, chunks, CHUNK, BELOW_ONE)
        drawn = tl.where(column == i, tl.where(tl.sum(left, 0) <= exhausted, -1, token), drawn)
        left = tl.where(here, rest, left)
    tl.store(tokens + row * k + column, drawn, mask=column < k)


@triton.jit(do_not_specialize=["k", "rows_each"])
def _top(
    tokens,  # [rows, k], in place for `chosen` requests
    best_share,  # [rows]: largest of each row
    best_token,  # [rows]
    probs,  # [rows, V]
    maxima,  # [rows, chunks]: of `probs` per chunk
    chosen,  # [requests] bool
    rows_each,  # of a request
    k,
    vocabulary,
    chunks,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,  # a power of two, as the next
    PADDED_K: tl.constexpr,
    POSSIBLE: tl.constexpr,  # -1 in place of tokens without mass
):
    row = tl.program_id(0).to(tl.int64)
    index, lane, column = tl.arange(0, PADDED_CHUNKS), tl.arange(0, CHUNK), tl.arange(0, PADDED_K)
    left = tl.load(maxima + row * chunks + index, mask=index < chunks, other=-1.0)
    from_target = tl.load(chosen + row // rows_each) != 0
    found = tl.full([PADDED_K], -1, tl.int64)
    tl.store(best_share + row, tl.max(left, 0))
    for i in range(tl.where(from_target, k, 1)):
        largest = tl.max(left, 0)
        chunk = tl.min(tl.where(left == largest, index, PADDED_CHUNKS), 0)
        token = chunk.to(tl.int64) * CHUNK + lane
        removed = tl.max((token[:, None] == found[None, :]).to(tl.int32), 1) != 0
        entry = tl.load(probs + row * vocabulary + token, mask=(token < vocabulary) & ~removed, other=-1.0)
        at = tl.min(tl.where(entry == largest, lane, CHUNK), 0)
        best = chunk.to(tl.int64) * CHUNK + at
        if i == 0:
            tl.store(best_token + row, best)
        found = tl.where(column == i, tl.where((largest > 0) | (not POSSIBLE), best, -1), found)
        rest = tl.max(tl.where(lane == at, -1.0, entry), 0)
        left = tl.where(index == chunk, rest, left)
    tl.store(tokens + row * k + column, found, mask=(column < k) & from_target)


@triton.jit(do_not_specialize=["number"], do_not_specialize_on_alignment=["key", "count"])
def _sample_other(
    tokens,  # [rows]
    probs,  # [rows, V]
    sums,  # [rows, chunks] float64: sums of `probs` per chunk
    best,  # [rows, K]
    count,  # [rows]: of `best` that are left out
    key,  # [rows]
    number,  # of the random number
    k,
    vocabulary,
    chunks,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,  # a power of two, as the next
    PADDED_K: tl.constexpr,
    BELOW_ONE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index, lane, column = tl.arange(0, PADDED_CHUNKS), tl.arange(0, CHUNK), tl.arange(0, PADDED_K)
    left_out = tl.minimum(tl.maximum(tl.load(count + row), 0), k)
    removed = tl.load(best + row * k + column, mask=column < left_out, other=-1)
    left = tl.load(sums + row * chunks + index, mask=index < chunks, other=0.0)
    probs += row * vocabulary
    for i in range(left_out):
        chunk = tl.sum(tl.where(column == i, removed, 0), 0) // CHUNK
        token = chunk * CHUNK + lane
        gone = tl.max((token[:, None] == removed[None, :]).to(tl.int32), 1) != 0
        entry = tl.load(probs + token, mask=(token < vocabulary) & ~gone, other=0.0)
        left = tl.where(index == chunk, tl.sum(entry.to(tl.float64), 0), left)
    u = uniform(tl.load(key + row), number)
    found, _, _ = pick(probs, left, removed, u, vocabulary, chunks, CHUNK, BELOW_ONE)
    last = tl.load(best + row * k + tl.minimum(left_out, k - 1))
    tl.store(tokens + row, tl.where(tl.sum(left, 0) > 0, found, last))


def put_top(tokens: Tensor, probs: Tensor, chosen: Tensor, *, possible: bool = True) -> tuple[Tensor, Tensor]:
    """Overwrite `tokens` [R, W, k] of the `chosen` [R] bool requests by the most probable ones, ties to the smaller
    token; -1 where none is left, if only those that are `possible` count.

    Returns:
        The largest of each row of `probs` [R, W, V], and its token: [R, W] each.
    """
    requests, width, k = tokens.shape
    maxima = chunk_maxima(probs)
    share, best = probs.new_empty(requests, width), torch.empty_like(tokens[..., 0])
    if tokens.numel():
        _top[(requests * width,)](
            *(tokens, share, best, probs, maxima, chosen.contiguous(), width, k, probs.shape[-1], maxima.shape[-1]),
            CHUNK=CHUNK,
            PADDED_CHUNKS=triton.next_power_of_2(maxima.shape[-1]),
            PADDED_K=triton.next_power_of_2(k),
            POSSIBLE=possible,
            num_warps=4 if maxima.shape[-1] <= 1024 else 8,
        )
    return share, best


@triton.jit(do_not_specialize=["places", "count"], do_not_specialize_on_alignment=["base", "key"])
def _fold_in(bound, base, key, places, count, BLOCK: tl.constexpr):
    """mix(base + mix(key)) for each of the `places` keys of a request."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = at < count
    own = mix(tl.load(key + at, mask=exists, other=0).to(tl.uint64))
    found = mix(tl.load(base + at // places, mask=exists, other=0).to(tl.uint64) + own)
    tl.store(bound + at, found.to(tl.int64), mask=exists)


@triton.jit(do_not_specialize=["purpose", "count"], do_not_specialize_on_alignment=["seed", "position"])
def _begin(key, seed, position, purpose, count, BLOCK: tl.constexpr):
    """mix(mix(seed) + 8 * position + purpose) for each request."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = at < count
    place = tl.load(position + at, mask=exists, other=0).to(tl.int64) * 8 + purpose
    mixed = mix(mix(tl.load(seed + at, mask=exists, other=0).to(tl.uint64)) + place.to(tl.uint64))
    tl.store(key + at, mixed.to(tl.int64), mask=exists)


class FusedRNG(CounterRNG):
    """`CounterRNG` whose samples take one pass over the distribution and one kernel launch."""

    @cached_property
    def key(self) -> Tensor:
        seed, position = self.seed.contiguous(), self.position.contiguous()
        key = torch.empty_like(seed)
        if len(seed):
            grid = (triton.cdiv(len(seed), FOLD_IN_BLOCK),)
            _begin[grid](key, seed, position, self.purpose, len(seed), BLOCK=FOLD_IN_BLOCK)
        return key

    def fold_in(self, key: Tensor) -> Self:
        key = key.contiguous()
        bound = type(self)(self.seed, self.position, self.purpose)
        bound.key = torch.empty_like(key)
        if key.numel():
            grid = (triton.cdiv(key.numel(), FOLD_IN_BLOCK),)
            _fold_in[grid](bound.key, self.key, key, key.numel() // key.shape[0], key.numel(), BLOCK=FOLD_IN_BLOCK)
        return bound

    def sample(self, probs: Tensor) -> Tensor:
        self.num_samples += 1
        return self._tokens(probs, 1, 2 * self.num_samples + 1, exhausted=-math.inf)[..., 0]

    def sample_without_replacement(self, probs: Tensor, k: int) -> Tensor:
        first, self.num_samples = self.num_samples + 1, self.num_samples + k
        return self._tokens(probs, k, 2 * first + 1, exhausted=EXHAUSTED)

    def sample_other(self, probs: Tensor, best: Tensor, count: Tensor) -> Tensor:
        """A token [R, W] other than the first `count` [R, W] of `best` [R, W, K]; if those have all the mass, the one
        after them."""
        self.num_samples += 1
        probs, sums, k = probs.contiguous(), chunk_sums(probs), best.shape[-1]
        tokens = torch.empty(best.shape[:-1], dtype=torch.int64, device=probs.device)
        if tokens.numel():
            _sample_other[(tokens.numel(),)](
                *(tokens, probs, sums, best.contiguous(), count.contiguous(), self.key.contiguous()),
                *(2 * self.num_samples + 1, k, probs.shape[-1], sums.shape[-1]),
                CHUNK=CHUNK,
                PADDED_CHUNKS=triton.next_power_of_2(sums.shape[-1]),
                PADDED_K=triton.next_power_of_2(k),
                BELOW_ONE=BELOW_ONE,
                num_warps=4 if sums.shape[-1] <= 1024 else 8,
            )
        return tokens

    def _tokens(self, probs: Tensor, k: int, number: int, exhausted: float) -> Tensor:
        """Tokens [..., k]; -1 once no more than the fraction `exhausted` of the mass is left."""
        probs = probs.contiguous()
        sums = chunk_sums(probs)
        tokens = torch.empty((*probs.shape[:-1], k), dtype=torch.int64, device=probs.device)
        if tokens.numel() == 0:
            return tokens
        _sample[(tokens.numel() // k,)](
            *(tokens, probs, sums, self.key.expand(probs.shape[:-1]).contiguous()),
            *(number, k, probs.shape[-1], sums.shape[-1]),
            CHUNK=CHUNK,
            PADDED_CHUNKS=triton.next_power_of_2(sums.shape[-1]),
            PADDED_K=triton.next_power_of_2(k),
            EXHAUSTED=exhausted,
            BELOW_ONE=BELOW_ONE,
            num_warps=4 if sums.shape[-1] <= 1024 else 8,
        )
        return tokens
