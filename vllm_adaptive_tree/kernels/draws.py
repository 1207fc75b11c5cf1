"""Tokens drawn from laws, all draws of a row in one launch."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import math
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.kernels.uniform import mix, uniform
from vllm_adaptive_tree.rng import EXHAUSTED, CounterRNG
from vllm_adaptive_tree.vocab_ops import CHUNK, chunk_sums

BIND = 256  # keys of a program
BELOW_ONE = 1 - 2.0**-53
"""Times a float64 it is the next smaller one."""


@triton.jit
def _draw(
    tokens,  # [rows, k]
    law,  # [rows, V]
    sums,  # [rows, chunks] float64: the law's, chunk by chunk
    key,  # [rows]
    number,  # of the first draw
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
    index, lane, column = tl.arange(0, PADDED_CHUNKS), tl.arange(0, CHUNK), tl.arange(0, PADDED_K)
    left = tl.load(sums + row * chunks + index, mask=index < chunks, other=0.0)
    exhausted = tl.sum(left, 0) * EXHAUSTED
    place = tl.load(key + row)
    drawn = tl.full([PADDED_K], -1, tl.int64)
    for i in range(k):
        reach = tl.cumsum(left, 0)
        total = tl.max(reach, 0)
        target = tl.minimum(total * uniform(place, number + 2 * i), total * BELOW_ONE)
        chunk = tl.minimum(tl.sum((reach <= target).to(tl.int32), 0), chunks - 1)
        here = index == chunk
        before = tl.sum(tl.where(here, reach - left, 0.0), 0)
        token = chunk.to(tl.int64) * CHUNK + lane
        gone = tl.max((token[:, None] == drawn[None, :]).to(tl.int32), 1) != 0
        entry = tl.load(law + row * vocabulary + token, mask=(token < vocabulary) & ~gone, other=0.0).to(tl.float64)
        inner = tl.cumsum(entry, 0)
        inside = tl.minimum(tl.maximum(target - before, 0.0), tl.max(inner, 0) * BELOW_ONE)
        at = tl.minimum(tl.sum((inner <= inside).to(tl.int32), 0), CHUNK - 1)
        inside_law = tl.minimum(chunk.to(tl.int64) * CHUNK + at, vocabulary - 1)
        found = tl.where(tl.sum(left, 0) <= exhausted, -1, inside_law)
        drawn = tl.where(column == i, found, drawn)
        left = tl.where(here, tl.sum(tl.where(lane == at, 0.0, entry), 0), left)
    tl.store(tokens + row * k + column, drawn, mask=column < k)


@triton.jit
def _bind(bound, base, key, places, count, BLOCK: tl.constexpr):
    """For each of `places` keys of a request: mix(base + mix(key))."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    own = mix(tl.load(key + at, mask=there, other=0).to(tl.uint64))
    found = mix(tl.load(base + at // places, mask=there, other=0).to(tl.uint64) + own)
    tl.store(bound + at, found.to(tl.int64), mask=there)


class FusedRNG(CounterRNG):
    """Draws by one kernel, behind one pass over the law."""

    def fold_in(self, key: Tensor) -> Self:
        key = key.contiguous()
        bound = type(self)(self.seed, self.position, self.purpose)
        bound.key = torch.empty_like(key)
        if key.numel():
            grid = (triton.cdiv(key.numel(), BIND),)
            _bind[grid](bound.key, self.key, key, key.numel() // key.shape[0], key.numel(), BLOCK=BIND)
        return bound

    def sample(self, law: Tensor) -> Tensor:
        self.num_samples += 1
        return self._tokens(law, 1, 2 * self.num_samples + 1, exhausted=-math.inf)[..., 0]

    def sample_without_replacement(self, law: Tensor, k: int) -> Tensor:
        first, self.num_samples = self.num_samples + 1, self.num_samples + k
        return self._tokens(law, k, 2 * first + 1, exhausted=EXHAUSTED)

    def _tokens(self, law: Tensor, k: int, number: int, exhausted: float) -> Tensor:
        """[..., k]; -1 where no more than this share of the law is left."""
        law = law.contiguous()
        sums = chunk_sums(law)
        tokens = torch.empty((*law.shape[:-1], k), dtype=torch.int64, device=law.device)
        if tokens.numel() == 0:
            return tokens
        _draw[(tokens.numel() // k,)](
            *(tokens, law, sums, self.key.expand(law.shape[:-1]).contiguous()),
            *(number, k, law.shape[-1], sums.shape[-1]),
            CHUNK=CHUNK,
            PADDED_CHUNKS=triton.next_power_of_2(sums.shape[-1]),
            PADDED_K=triton.next_power_of_2(k),
            EXHAUSTED=exhausted,
            BELOW_ONE=BELOW_ONE,
            num_warps=4 if sums.shape[-1] <= 1024 else 8,
        )
        return tokens
