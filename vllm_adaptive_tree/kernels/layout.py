"""Layout of drafted trees as rows of a batch: positions, tokens, the tree mask and the cut trees, in one launch."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.masks import WORD
from vllm_adaptive_tree.trees.tree_batch import EMPTY


@triton.jit(
    do_not_specialize=["plain"],
    do_not_specialize_on_alignment=["request", "logits_start", "row_start", "positions", "input_ids"],
)
def _bits(
    tokens_out,  # [R, N], as the next three the trees that are verified
    parent_out,
    depth_out,
    weight_out,
    slot_out,  # [R, 1 + N]
    planned_out,  # [R, 1 + N]
    place_out,  # [R]
    first_out,  # [R]
    root_out,  # [R]
    context_out,  # [R] int32
    bits_out,  # [rows, WORDS]
    positions,  # [rows], in place
    input_ids,  # [rows], in place
    tokens,  # [B, N], as the next three the drafted trees
    parent,
    depth,
    weight,
    read,  # [B, N]
    planned,  # [B, 1 + N]
    drafted_place,  # [requests]
    drafted_root,  # [requests]
    request,  # [R]
    logits_start,  # [R + 1]
    row_start,  # [R + 1]
    plain,  # 1: without trees
    NODES: tl.constexpr,
    PADDED: tl.constexpr,  # a power of two above NODES
    WORDS: tl.constexpr,
    PADDED_WORDS: tl.constexpr,  # a power of two
    WORD: tl.constexpr,
    EMPTY: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    rows = tl.load(logits_start + number + 1) - tl.load(logits_start + number)  # the root and its nodes
    first = tl.load(row_start + number + 1).to(tl.int64) - rows
    root = tl.load(positions + first, mask=rows > 0, other=0).to(tl.int64)
    index = tl.load(request + number, mask=rows > 0, other=0)
    place = tl.load(drafted_place + index)
    known = (place >= 0) & (tl.load(drafted_root + index) == root) & (plain == 0)
    limit = tl.where(known, rows - 1, 0)
    place = tl.maximum(place, 0)

    row = tl.arange(0, PADDED)  # 0: the root
    node = row - 1
    inside = (row > 0) & (row <= NODES)
    from_tree = place * NODES + node
    token = tl.load(tokens + from_tree, mask=inside & (node < limit), other=EMPTY)
    valid = token != EMPTY
    above = tl.load(parent + from_tree, mask=valid, other=-1)
    level = tl.load(depth + from_tree, mask=valid, other=0)
    at = number * NODES + node
    tl.store(tokens_out + at, token, mask=inside)
    tl.store(parent_out + at, above, mask=inside)
    tl.store(depth_out + at, level, mask=inside)
    tl.store(weight_out + at, tl.load(weight + from_tree, mask=valid, other=float("-inf")), mask=inside)
    any_node = tl.max(valid.to(tl.int64), 0)
    slot = tl.load(read + from_tree, mask=valid, other=-1)
    slot = tl.where(row == 0, any_node - 1, slot)
    tl.store(slot_out + number * (NODES + 1) + row, slot, mask=row <= NODES)
    children = tl.load(planned + place * (NODES + 1) + row, mask=row <= NODES, other=0)
    tl.store(planned_out + number * (NODES + 1) + row, children, mask=row <= NODES)
    tl.store(place_out + number, place)
    tl.store(first_out + number, first)
    tl.store(root_out + number, root)
    tl.store(context_out + number, root.to(tl.int32))

    word = tl.arange(0, PADDED_WORDS)
    ancestor = row.to(tl.int64)
    seen = tl.where(ancestor[:, None] // WORD == word[None, :], one_bit(ancestor % WORD)[:, None], 0)
    seen = seen | tl.where(word == 0, 1, 0)[None, :].to(tl.int64)  # every row sees the root
    ancestor = tl.where(valid, ancestor, 0)
    while tl.max(ancestor, 0) > 0:
        ancestor = tl.load(parent + place * NODES + ancestor - 1, mask=ancestor > 0, other=-1) + 1
        seen = seen | tl.where(ancestor[:, None] // WORD == word[None, :], one_bit(ancestor % WORD)[:, None], 0)
    own = (row < rows)[:, None] & (word < WORDS)[None, :]
    tl.store(bits_out + (first + row)[:, None] * WORDS + word[None, :], seen, mask=own)
    tl.store(positions + first + row, root + level, mask=valid)
    tl.store(input_ids + first + row, tl.where(valid, token, 0), mask=(row > 0) & (row < rows))


@triton.jit
def one_bit(place):
    return tl.full([], 1, tl.int64) << place


class Drafted(NamedTuple):
    """Drafted trees, B of them, and the place of each request's tree."""

    tree: TreeBatch  # [B, N]
    read: Tensor  # [B, N] int64: row of the draft that a node has, -1: never read
    planned: Tensor  # [B, 1 + N] int64: children planned after the root and the nodes
    place: Tensor  # [requests] int64: the tree of each request, -1: none
    root: Tensor  # [requests] int64: the position of its root


class Layout(NamedTuple):
    """Persistent buffers; their first entries are the batch's. Int64 but for weights, contexts."""

    tree: TreeBatch  # [R, N]: cut to the rows of the batch; empty if none was drafted for that root
    slot: Tensor  # [R, 1 + N]: as `Drafted.read`, the root first
    planned: Tensor  # [R, 1 + N]
    place: Tensor  # [R]: as `Drafted.place`, 0: none
    first: Tensor  # [R]: row of each root
    root: Tensor  # [R]: its position
    context: Tensor  # [R] int32: the same, tokens before the root
    bits: Tensor  # [rows, W]: `trees.masks.ancestor_bits`, row by row

    @classmethod
    def empty(cls, requests: int, rows: int, nodes: int, device: torch.device) -> Self:
        number = torch.zeros(requests, dtype=torch.int64, device=device)
        whole = number.new_zeros(requests, nodes)
        tree = TreeBatch(whole.clone(), whole.clone(), whole.clone(), whole.float())
        entries = number.new_zeros(requests, 1 + nodes)
        numbers = number.clone(), number.clone(), number.clone(), number.int()
        return cls(tree, entries, entries.clone(), *numbers, number.new_zeros(rows, -(-(1 + nodes) // WORD)))

    def roots(self, lengths: Tensor, rows: int) -> None:
        """Write what the attention kernel reads of a batch without trees, in a graph that holds it.

        Args:
            lengths: [R] int32, tokens of each request, its root's included.
            rows: of the batch, and of padding.
        """
        self.bits[:rows, 0] = 1
        torch.sub(lengths, 1, out=self.context[: len(lengths)])

    def update(
        self,
        drafted: Drafted,
        request: Tensor,
        logits_start: Tensor,
        row_start: Tensor,
        positions: Tensor,
        input_ids: Tensor,
        *,
        plain: bool = False,
    ) -> None:
        """Fill the buffers, and in place write root + depth to `positions` and tokens to `input_ids` of all nodes.

        Rows without a node keep their position, get token 0 and see the root and themselves. Nothing is read on the
        host. Trees are in generation order, or any other with parents before children; they are cut to their first
        nodes.

        Args:
            request: [R] index of each request in `drafted.place`; R is at most that of the buffers.
            logits_start: [R + 1] int32, sums of the rows of the root and its nodes; equal numbers: a padded request.
            row_start: [R + 1] int32, first row of each request, of which those are the last.
            positions: [rows] int64, linear.
            input_ids: [rows] int32.
            plain: True to leave the trees empty.
        """
        requests, nodes = len(request), self.tree.tokens.shape[1]
        assert drafted.tree.tokens.shape[1] == nodes
        assert all(part.is_contiguous() for part in (*drafted.tree, *drafted[1:]))
        if requests:
            _bits[(requests,)](
                *(*self.tree, *self[1:], positions, input_ids),
                *(*drafted.tree, *drafted[1:], request, logits_start, row_start, int(plain)),
                NODES=nodes,
                PADDED=triton.next_power_of_2(nodes + 1),
                WORDS=self.bits.shape[1],
                PADDED_WORDS=triton.next_power_of_2(self.bits.shape[1]),
                WORD=WORD,
                EMPTY=EMPTY,
                num_warps=4,
            )
