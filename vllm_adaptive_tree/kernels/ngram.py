"""Prompt look-up of a batch in one launch, over texts where the engine keeps them."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

import math
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.drafters.lookup import Continuations
from vllm_adaptive_tree.drafters.ngram import LENGTH, LONGER, MATCHES, NOTHING, NGram

BLOCK, WARPS = 4096, 16
"""Places of the text that are compared at a time: a long context is a row of them, one after the other."""
COMMON = 1 << 32
"""Worth of a token in common, in places: longer occurrences come first, then later ones."""


@triton.jit(do_not_specialize=["requests", "shortest", "longest"], do_not_specialize_on_alignment=["index"])
def _look_up(
    tokens_out,  # [R, MATCHES, LENGTH], -1 pads
    weight_out,  # [R, MATCHES]
    text,  # [requests, row]
    length,  # [requests]
    index,  # [R]
    row,
    requests,
    shortest,
    longest,
    COMMON: tl.constexpr,
    MATCHES: tl.constexpr,  # a power of two, as the next
    LENGTH: tl.constexpr,
    LOG_LONGER: tl.constexpr,
    NOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    own = tl.load(index + request).to(tl.int64)
    known = own < requests  # or it is padding
    size = tl.load(length + own, mask=known, other=0).to(tl.int64)
    text += own * row
    lane, slot = tl.arange(0, BLOCK).to(tl.int64), tl.arange(0, MATCHES)
    best = tl.full([MATCHES], -1, tl.int64)
    certain = longest.to(tl.int64) * COMMON
    start = (size + BLOCK - 1) // BLOCK * BLOCK - BLOCK
    while start >= 0:
        place = start + lane
        same, common = place < size, tl.zeros([BLOCK], tl.int64)
        for back in range(1, longest + 1):
            same = same & (place >= back)
            last = tl.load(text + size - back, mask=size >= back, other=-1)
            same = same & (tl.load(text + place - back, mask=same, other=-2) == last)
            common += same.to(tl.int64)
        score = tl.where(common >= shortest, common * COMMON + place, -1)
        least, highest = tl.min(best, 0), tl.max(score, 0)
        while highest > least:
            worst = tl.min(tl.where(best == least, slot, MATCHES), 0)
            best = tl.where(slot == worst, highest, best)
            score = tl.where(score == highest, -1, score)
            least, highest = tl.min(best, 0), tl.max(score, 0)
        start = tl.where(least >= certain, -1, start - BLOCK)  # none before is longer or later

    before = (best[None, :] > best[:, None]) | ((best[None, :] == best[:, None]) & (slot[None, :] < slot[:, None]))
    order = tl.sum(before.to(tl.int32), 1)
    found, common = best >= 0, tl.where(best >= 0, best // COMMON, 0)
    most = tl.maximum(tl.max(common, 0), 1)
    weight = tl.where(found, tl.exp2(LOG_LONGER * (common - most).to(tl.float32)), 0.0)
    total = tl.sum(weight, 0) + NOTHING * tl.exp2(LOG_LONGER * (1 - most).to(tl.float32))
    tl.store(weight_out + request * MATCHES + order, weight / total)
    at = tl.where(found, best % COMMON, 0)[:, None] + tl.arange(0, LENGTH)[None, :]
    inside = found[:, None] & (at < size)
    token = tl.load(text + at, mask=inside, other=-1).to(tl.int64)
    out = (request * MATCHES + order)[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
    tl.store(tokens_out + out, token)


class FusedNGram(NGram):
    """Finds what `NGram` does."""

    @classmethod
    def of(cls, draft: NGram) -> Self:
        return cls(draft.vocabulary, draft.shortest, draft.longest)

    def search(self, text: Tensor, length: Tensor, index: Tensor) -> Continuations:
        """Continuations of the texts of R requests, without reading a length on the host.

        Args:
            text: [requests, row] int32.
            length: [requests] int32, tokens of each.
            index: [R], rows of these; an index of no row has no continuation.
        """
        count, (requests, row) = len(index), text.shape
        assert text.stride(1) == 1
        tokens = torch.empty(count, MATCHES, LENGTH, dtype=torch.int64, device=text.device)
        weight = torch.empty(count, MATCHES, dtype=torch.float32, device=text.device)
        if count:
            _look_up[(count,)](
                *(tokens, weight, text, length, index, text.stride(0), requests, self.shortest, min(self.longest, row)),
                COMMON=COMMON,
                MATCHES=MATCHES,
                LENGTH=LENGTH,
                LOG_LONGER=math.log2(LONGER),
                NOTHING=NOTHING,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
        return Continuations(tokens, weight)
