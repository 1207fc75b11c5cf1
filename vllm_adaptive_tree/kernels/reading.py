"""Rows that a draft reads after a step, and the roots of its next trees: one launch, into persistent buffers."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.kernels.layout import one_bit
from vllm_adaptive_tree.trees.masks import WORD

PAD_SLOT = -1
"""Slot of rows whose K/V is not stored, as in vLLM."""

READY, CHOSEN = 1, 2
"""Flags of a request."""


@triton.jit(
    do_not_specialize=["requests", "limit", "nobody", "rows", "certain", "random", "threshold", "floor", "shift"],
    do_not_specialize_on_alignment=["index", "num_sampled", "ready", "row_start", "nodes", "table"],
)
def _read(
    request_out,  # [P], as the next six
    position_out,
    alive_out,
    temperature_out,
    greedy_out,
    chosen_out,
    seed_out,
    limits_out,  # [2]
    tokens_out,  # [rows], as the next three
    positions_out,
    slots_out,
    source_out,
    bits_out,  # [rows, WORDS]
    start_out,  # [P + 1]
    context_out,  # [P]
    last_out,  # [P]
    index,  # [R]
    num_sampled,  # [R]
    ready,  # [R]
    row_start,  # [R + 1]
    computed,  # [requests], as the next two
    temperature,
    seed,
    text,  # [requests, text_row]
    nodes,  # [R, nodes_row]
    table,  # [R, table_row]
    text_row,
    nodes_row,
    table_row,
    requests,  # R
    limit,
    nobody,
    rows,
    certain,
    random,
    threshold,
    floor,
    shift,
    FOLLOWS: tl.constexpr,
    READY: tl.constexpr,
    CHOSEN: tl.constexpr,
    READS: tl.constexpr,  # True: rows are written
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,  # a power of two, as the next two
    PADDED_REQUESTS: tl.constexpr,
    PADDED_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per request, padding included; each computes the row counts of all."""
    number = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, PADDED_REQUESTS)
    exists = every < requests
    sampled = tl.load(num_sampled + every, mask=exists, other=0).to(tl.int64)
    indices = tl.load(index + every, mask=exists, other=0)
    ends = tl.load(computed + indices, mask=exists, other=0).to(tl.int64)
    flags = tl.load(ready + every, mask=exists, other=0).to(tl.int32)
    alive = exists & (sampled > 0) & (ends + 1 < limit) & (flags & READY != 0)
    counts = tl.where(alive, tl.minimum(sampled + 1 - shift, WIDTH), 0)

    here = every == number
    real = number < requests
    own_index = tl.sum(tl.where(here, indices, 0), 0)
    own_alive = tl.sum(tl.where(here & alive, 1, 0), 0)
    end = tl.sum(tl.where(here, ends, 0), 0)
    tl.store(request_out + number, tl.where(real, own_index, nobody))
    tl.store(position_out + number, end)
    tl.store(alive_out + number, own_alive.to(tl.int8))
    requested = tl.load(temperature + own_index, mask=real, other=1.0)
    greedy = requested == 0
    tl.store(temperature_out + number, tl.where(greedy, certain, requested if FOLLOWS else random))
    tl.store(greedy_out + number, greedy.to(tl.int8))
    tl.store(chosen_out + number, (tl.sum(tl.where(here, flags & CHOSEN, 0), 0) != 0).to(tl.int8))
    tl.store(seed_out + number, tl.load(seed + own_index, mask=real, other=0))
    if number == 0:
        tl.store(limits_out, threshold)
        tl.store(limits_out + 1, floor)

    if READS:
        begin = tl.sum(tl.where(every < number, counts, 0), 0)
        count = tl.sum(tl.where(here, counts, 0), 0)
        first = end - tl.sum(tl.where(here & alive, sampled, 0), 0)  # position of the first row
        tl.store(start_out + number, begin.to(tl.int32))
        tl.store(context_out + number, tl.where(own_alive != 0, first, 0).to(tl.int32))
        tl.store(last_out + number, tl.where(count > 0, begin + count - 1, 0))
        row = tl.arange(0, PADDED_WIDTH)
        inside = row < count
        position = first + row
        at = begin + row
        token = tl.load(text + own_index * text_row + position + shift, mask=inside, other=0)
        block = tl.load(table + number * table_row + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        above = tl.load(nodes + number * nodes_row + row - 1, mask=inside & (row > 0), other=-1)
        root = tl.load(row_start + number, mask=real, other=0).to(tl.int64)
        tl.store(tokens_out + at, token.to(tl.int32), mask=inside)
        tl.store(positions_out + at, position, mask=inside)
        tl.store(slots_out + at, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
        tl.store(source_out + at, root + 1 + above, mask=inside)
        word = tl.arange(0, PADDED_WORDS)
        seen = row[:, None].to(tl.int64) - word[None, :] * WORD  # place of the row in each word
        bits = tl.where(seen >= WORD - 1, -1, one_bit(tl.minimum(tl.maximum(seen + 1, 0), WORD - 1)) - 1)
        tl.store(bits_out + at[:, None] * WORDS + word[None, :], bits, mask=inside[:, None] & (word < WORDS)[None, :])
        if number == tl.num_programs(0) - 1:
            tl.store(start_out + number + 1, (begin + count).to(tl.int32))
            for start in range(begin + count, rows, BLOCK):
                rest = start + tl.arange(0, BLOCK)
                tl.store(tokens_out + rest, 0, mask=rest < rows)
                tl.store(positions_out + rest, 0, mask=rest < rows)
                tl.store(slots_out + rest, PAD_SLOT, mask=rest < rows)
                tl.store(source_out + rest, 0, mask=rest < rows)


class Cache(NamedTuple):
    """Paged cache of the draft."""

    table: Tensor  # [R, B] int32, row by row those of the batch
    block_size: int


class StepTensors(NamedTuple):
    """A step of R requests. Tables are by vLLM's index of the request and, like `num_computed`, include this step."""

    request: Tensor  # [R] int64
    num_sampled: Tensor  # [R]: 0 in the middle of a prompt
    row_start: Tensor  # [R + 1] int32, of the target's batch
    nodes: Tensor | None  # [R, L] int64: the accepted path, -1 pads; None: without trees
    num_computed: Tensor  # [requests] int32: the position of the root, the token sampled last
    temperature: Tensor  # [requests] float32
    seed: Tensor  # [requests] int64
    text: Tensor  # [requests, length] int32


class Shaping(NamedTuple):
    """Draft temperatures and bounds of a tree; host numbers."""

    certain: float  # draft temperature of greedy requests
    random: float  # draft temperature of the others, unless `follows`
    follows: bool  # True: the others keep their own temperature
    threshold: float
    floor: float


class DraftInputs(NamedTuple):
    """Inputs of P requests, padding included, in persistent buffers, so that a CUDA graph may read them.

    Rows are those that the draft reads next: the last root and the accepted path after it, the next root included, one
    request after the other. A head's row has the token after its position, and its rows end before the next root.
    """

    request: Tensor  # [P] int64: vLLM's index, or that of padding
    position: Tensor  # [P] int64: of the next root
    alive: Tensor  # [P] int8: 0: no tree grows there
    temperature: Tensor  # [P] float32: of the draft
    greedy: Tensor  # [P] int8
    chosen: Tensor  # [P] int8: it walks with the target's own draws
    seed: Tensor  # [P] int64
    limits: Tensor  # [2] float64: threshold and floor of the proposer
    tokens: Tensor  # [rows] int32
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64 in the cache, -1: after the last row
    source: Tensor  # [rows] int64: of the target's batch, which has the hidden state of this one
    bits: Tensor  # [rows, W] int64: a chain, as `trees.masks.ancestor_bits`
    row_start: Tensor  # [P + 1] int32
    context: Tensor  # [P] int32: tokens before the first row
    last: Tensor  # [P] int64: the last row of a request

    @classmethod
    def empty(cls, requests: int, width: int, device: torch.device) -> Self:
        """`width`: most rows of a request."""
        rows = torch.zeros(requests * width, dtype=torch.int64, device=device)
        number = torch.zeros(requests, dtype=torch.int64, device=device)
        flag, limits = number.to(torch.int8), number.new_zeros(2, dtype=torch.float64)
        roots = number, number.clone(), flag, number.float(), flag.clone(), flag.clone(), number.clone(), limits
        bits = rows.new_zeros(len(rows), -(-max(width, 1) // WORD))
        starts = number.new_zeros(requests + 1).int(), number.int(), number.clone()
        return cls(*roots, rows.int(), rows, rows.clone().fill_(PAD_SLOT), rows.clone(), bits, *starts)

    def update(
        self,
        step: StepTensors,
        shaping: Shaping,
        ready: Tensor,
        cache: Cache | None,
        *,
        padded: int,
        padding: int,
        limit: int,
        shift: int,
    ) -> None:
        """Fill the buffers for `padded` requests, at least R. Nothing is read on the host.

        Args:
            ready: [R or more] int8: sum of READY, if the draft has read all tokens before this step, and CHOSEN.
            cache: None: the draft has none, and no rows are written.
            padding: index of the requests after R.
            limit: most tokens that the draft can read.
            shift: 1 for a head, else 0.
        """
        most = len(self.request)
        width = len(self.tokens) // most
        nodes = step.nodes
        if nodes is None:  # its rows have one sampled token; nodes read beyond it are not used
            nodes = self.source.expand(len(step.request), -1)
        table = self.source[None] if cache is None else cache.table
        assert step.text.stride(1) == nodes.stride(1) == table.stride(1) == 1
        _read[(padded,)](
            *self,
            *(step.request, step.num_sampled, ready, step.row_start),
            *(step.num_computed, step.temperature, step.seed, step.text, nodes, table),
            *(step.text.stride(0), nodes.stride(0), table.stride(0)),
            *(len(step.request), limit, padding, padded * width),
            *(float(shaping.certain), float(shaping.random), float(shaping.threshold), float(shaping.floor), shift),
            FOLLOWS=shaping.follows,
            READY=READY,
            CHOSEN=CHOSEN,
            READS=cache is not None,
            WIDTH=width,
            PADDED_WIDTH=triton.next_power_of_2(max(width, 1)),
            PADDED_REQUESTS=triton.next_power_of_2(most),
            PADDED_WORDS=triton.next_power_of_2(self.bits.shape[1]),
            WORDS=self.bits.shape[1],
            WORD=WORD,
            BLOCK_SIZE=1 if cache is None else cache.block_size,
            PAD_SLOT=PAD_SLOT,
            BLOCK=128,
            num_warps=4,
        )

    def clear(self) -> None:
        """Clear the buffers: no request is there."""
        for part in (self.alive, self.row_start, self.context, self.last):
            part.zero_()
        self.slots.fill_(PAD_SLOT)
