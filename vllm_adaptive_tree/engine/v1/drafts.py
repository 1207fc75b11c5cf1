"""Drafted trees between two steps, with the distributions that their nodes were sampled from."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_adaptive_tree.budget import Plan
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.trees import TokenTree


class Draft(NamedTuple):
    """Tree of one request. Entry 0 of `row` and `num_planned` is the root, entry 1 + i node i."""

    tree: TokenTree
    logits: Tensor | None  # [inner nodes, V] of the draft model, if a rule reads them
    row: NDArray[np.int64]  # of `logits`, -1 for a node that was never read
    num_planned: NDArray[np.int64]  # children planned for it
    temperature: float
    initial: int = 0  # leading nodes that the target has sampled
    hidden: Tensor | None = None  # [inner nodes, H] of the draft model, if a recorder reads them
    value: Sequence[float] | NDArray[np.float32] = ()  # of each node, if there is a budget
    depth: Sequence[int] | NDArray[np.int64] = ()  # of each node, negative from a look-up, if there is a budget
    greedy: bool = False  # its request, if there is a budget
    root: Tensor | None = None  # [V] logits at the root of a greedy request, if a budget has them
    plan: Plan | None = None  # by which a budget has cut it
    cell: Sequence[int] | NDArray[np.int64] = ()  # of each node, if its proposer learns acceptance
    chosen: Sequence[bool] | NDArray[np.bool_] = ()  # of each node: a look-up has chosen it; (): there is no look-up
    from_lookup: bool = False  # True if a look-up alone has made it while the draft rested

    def prefix(self, length: int) -> "Draft":
        """Draft of the first `length` nodes, or of all."""
        if length >= len(self.tree):
            return self
        return self._replace(
            tree=self.tree.prefix(length),
            row=self.row[: 1 + length],
            num_planned=self.num_planned[: 1 + length],
            initial=min(self.initial, length),
            value=self.value[:length],
            depth=self.depth[:length],
            cell=self.cell[:length],
            chosen=self.chosen[:length],
        )

    def probs(self, node: int) -> Tensor:
        """q [V] that the children of `node` (-1: the root) were sampled from."""
        assert self.logits is not None
        return softmax_at(self.logits[self.row[1 + node]], torch.tensor(self.temperature))

    def all_probs(self) -> Tensor:
        """[inner nodes, V]: all of these, by `row`."""
        assert self.logits is not None
        return softmax_at(self.logits, torch.full_like(self.logits[:, 0], self.temperature))


NOTHING = Draft(TokenTree((), ()), None, np.full(1, -1), np.zeros(1, np.int64), 1.0)


def to_drafts(
    proposal: Proposal,
    levels: list[Tensor],
    temperature: Tensor,
    initial: Tensor | None = None,
    hidden: Sequence[Tensor] = (),
) -> list[Draft]:
    """Move R trees to the host; `levels`: the logits [R, W, V] of every level read, if a rule reads them; `initial`: as
    in `Request`; `hidden`: [R, W, H] of every level, if a recorder reads them."""
    tree, read, planned, cell, chosen = proposal
    rows = torch.cat(levels, 1) if levels else None  # [R, slots, V]
    states = torch.cat(tuple(hidden), 1) if hidden else None  # [R, slots, H]
    tokens, slot = tree.tokens.numpy(), read.numpy()
    sizes, was_read = (tokens >= 0).sum(1).tolist(), (slot > 0) & (tokens >= 0)
    row = np.zeros((len(tokens), 1 + tokens.shape[1]), np.int64)
    row[:, 1:] = np.where(was_read, was_read.cumsum(1), -1)  # in the order of the nodes
    cells, flags = ([()] * len(sizes) if part is None else part.numpy() for part in (cell, chosen))
    given = [0] * len(sizes) if initial is None else (initial >= 0).sum(1).tolist()
    columns = tokens.tolist(), tree.parent.tolist(), row, planned.numpy(), cells, flags
    each = zip(sizes, *columns, temperature.tolist(), given, strict=True)
    drafts = []
    for r, (size, drafted, parents, place, counts, learnt, flag, own, sampled) in enumerate(each):
        if not size:
            drafts.append(NOTHING)
            continue
        inner = torch.from_numpy(np.append(0, slot[r, was_read[r]])) if levels or hidden else None
        drafts.append(
            Draft(
                TokenTree(tuple(drafted[:size]), tuple(parents[:size])),
                None if rows is None else rows[r, inner],
                place[: 1 + size],
                counts[: 1 + size],
                own,
                min(size, sampled),
                None if states is None else states[r, inner],
                cell=learnt[:size],
                chosen=flag[:size],
            )
        )
    return drafts


def draft_probs(drafts: dict[int, Draft], node: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """q [R, V] after `node` [R], and the number of children planned [R]; zeros for unread nodes."""
    q, planned = torch.zeros(len(node), vocabulary), torch.zeros_like(node)
    for request, at in enumerate(node.tolist()):
        draft = drafts.get(request)
        if draft is not None and draft.logits is not None and len(draft.tree) and draft.row[1 + at] >= 0:
            q[request], planned[request] = draft.probs(at), draft.num_planned[1 + at]
    return q, planned
