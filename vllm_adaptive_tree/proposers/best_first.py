"""Growth by value: of all candidates so far the n best are kept, whatever a method's value is.

Values never increase from a parent to its child. So the n best form a tree, a node that has fallen out of them has no
descendant that could enter, and its row is not drafted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.proposers.base import Frontier, Proposal, Request
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY


class Candidates(NamedTuple):
    """The next level: C candidates of each request; value -inf where there is none."""

    tokens: Tensor  # [R, C]
    above: Tensor  # [R, C]: column of the frontier below which it stands (0 for the children of the root)
    value: Tensor  # [R, C]: log value, by which nodes are kept and ordered
    path: Tensor  # [R, C]: log probability of the path under the draft
    drawn: Tensor  # [R, W]: how many children each column of the frontier was to get


class Growth(NamedTuple):
    best: TreeBatch  # [R, n], by value descending, ties to the older node; `log_weight` is the value
    path: Tensor  # [R, n]: log path probability
    read: Tensor  # [R, n]: the drafter's number of each node, -1 before it was read
    drawn: Tensor  # [R, n + 1]
    gain: Tensor  # [R]: growth of the sum of all values by the last level
    level: int
    numbers: int  # slots given to the drafter so far, the root included
    request: Request


def begin(candidates: Candidates, *, nodes: int, request: Request) -> Growth:
    """Layer 1."""
    empty = _empty(candidates.value, nodes)
    minus = torch.full_like(empty.tokens, -1)
    drawn = torch.nn.functional.pad(torch.zeros_like(empty.tokens), (1, 0))
    start = Growth(
        empty, empty.log_weight, minus, drawn, torch.full_like(empty.log_weight[:, 0], torch.inf), 0, 0, request
    )
    return extend(start, candidates, expand=torch.zeros_like(minus, dtype=torch.bool))


def expandable(growth: Growth) -> Tensor:
    """Nodes [R, n] of the last level whose children could enter the n best."""
    worst = growth.best.log_weight[:, -1:]  # -inf while there is room
    return (growth.best.depth == growth.level) & (growth.path > worst)


def frontier(growth: Growth, expand: Tensor) -> Frontier:
    """The nodes to `expand` [R, n] bool, packed to the left, the best in front."""
    slot, used = packed(expand)
    best = growth.best
    above = growth.read.gather(1, best.parent.clamp(min=0)).masked_fill(best.parent < 0, 0)
    return Frontier(best.tokens.gather(1, slot).masked_fill(~used, EMPTY), above.gather(1, slot))


def packed(expand: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [R, n] with those to expand in front, and which of them those are: the columns of the frontier."""
    used, slot = expand.sort(dim=1, descending=True, stable=True)
    return slot, used


def paths_above(growth: Growth, expand: Tensor, width: int) -> Tensor:
    """Log path probabilities of the first `width` columns of the frontier, -inf where one is unused: [R, W]."""
    slot, used = (x[:, :width] for x in packed(expand))
    return growth.path.gather(1, slot).masked_fill(~used, -torch.inf)


def extend(growth: Growth, candidates: Candidates, *, expand: Tensor) -> Growth:
    """Read the frontier, of as many columns as `candidates.drawn` [R, W], and let its children compete."""
    best, nodes = growth.best, growth.best.tokens.shape[1]
    width = candidates.drawn.shape[1]
    numbers = growth.numbers + torch.arange(width, device=best.tokens.device)
    read, drawn = growth.read, growth.drawn
    if growth.level == 0:  # below the root, which has no slot
        above = torch.full_like(candidates.above, -1)
        drawn = torch.cat([candidates.drawn, drawn[:, 1:]], 1)
    else:
        slot, used = (x[:, :width] for x in packed(expand))  # [R, W]
        above = slot.gather(1, candidates.above)
        read = read.scatter(1, slot, torch.where(used, numbers.expand_as(slot), read.gather(1, slot)))
        drawn = drawn.scatter(1, slot + 1, torch.where(used, candidates.drawn, drawn.gather(1, slot + 1)))
    value, index = candidates.value.sort(dim=1, descending=True, stable=True)  # ties to the earlier candidate
    value, index = value[:, :nodes], index[:, :nodes]
    missing = value == -torch.inf
    level = TreeBatch(
        candidates.tokens.gather(1, index).masked_fill(missing, EMPTY),
        above.gather(1, index).masked_fill(missing, -1),
        torch.full_like(index, growth.level + 1).masked_fill(missing, 0),
        value,
    )
    # n old nodes and their new children: a stable sort keeps the older of two equals in front, so parents come first
    merged = [torch.cat(pair, 1) for pair in zip(best, level, strict=True)]
    order = merged[3].sort(dim=1, descending=True, stable=True).indices
    rank = order.argsort(dim=1)  # slot -> rank
    keep = order[:, :nodes]
    tokens, parent, depth, weight = (column.gather(1, keep) for column in merged)
    parent = torch.where(parent < 0, -1, rank.gather(1, parent.clamp(min=0)))
    path = torch.cat([growth.path, candidates.path.gather(1, index)], 1).gather(1, keep)
    fresh = torch.full_like(index, -1)
    read = torch.cat([read, fresh], 1).gather(1, keep)
    drawn = torch.cat([drawn[:, :1], torch.cat([drawn[:, 1:], fresh + 1], 1).gather(1, keep)], 1)
    gain = weight.exp().sum(1) - best.log_weight.exp().sum(1)
    return Growth(
        TreeBatch(tokens, parent, depth, weight),
        path.masked_fill(tokens == EMPTY, -torch.inf),
        read,
        drawn,
        gain,
        growth.level + 1,
        growth.numbers + width,
        growth.request,
    )


def finish(growth: Growth) -> Proposal:
    return Proposal(growth.best, growth.read, growth.drawn)


def _empty(like: Tensor, nodes: int) -> TreeBatch:
    """[R, n] slots without a node; `like` [R, ..] gives dtype and device."""
    minus = torch.full((like.shape[0], nodes), -1, device=like.device)
    weight = torch.full(minus.shape, -torch.inf, dtype=like.dtype, device=like.device)
    return TreeBatch(minus, minus, torch.zeros_like(minus), weight)
