"""Growth by value: of all candidates so far the n best are kept, whatever a method's value is.

Values never increase from a parent to its child. So the n best form a tree, a node that has fallen out of them has no
descendant that could enter, and its row is not drafted.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    level, path = _level(candidates, torch.full_like(candidates.above, -1), 1, nodes)
    room = nodes - level.tokens.shape[1]
    if room > 0:
        fills = (EMPTY, -1, 0, -torch.inf)
        level = TreeBatch(*(pad(column, (0, room), value=fill) for column, fill in zip(level, fills, strict=True)))
        path = pad(path, (0, room), value=-torch.inf)
    unread = torch.full_like(level.tokens, -1)
    drawn = torch.cat([candidates.drawn, torch.zeros_like(unread)], 1)
    return Growth(level, path, unread, drawn, level.log_weight.exp().sum(1), 1, 1, request)


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
    place = expand.cumsum(1)
    now, column = expand & (place <= width), (place - 1).clamp_(0, width - 1)
    read = torch.where(now, growth.numbers + column, growth.read)
    drawn = torch.where(now, candidates.drawn.gather(1, column), growth.drawn[:, 1:])
    above = packed(expand)[0].gather(1, candidates.above)
    level, path = _level(candidates, above, growth.level + 1, nodes)
    fresh = torch.full_like(level.tokens, -1)
    old = torch.stack([*best[:3], read, drawn], 1)  # [R, 5, n]
    merged = torch.cat([old, torch.stack([*level[:3], fresh, fresh + 1], 1)], 2)
    # n old nodes and their new children: a stable sort keeps the older of two equals in front, so parents come first
    weight, order = torch.cat([best.log_weight, level.log_weight], 1).sort(dim=1, descending=True, stable=True)
    weight, keep = weight[:, :nodes], order[:, :nodes]
    tokens, parent, depth, read, drawn = merged.gather(2, keep[:, None].expand(-1, 5, -1)).unbind(1)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)  # slot -> rank
    parent = torch.where(parent < 0, -1, rank.gather(1, parent.clamp(min=0)))
    return Growth(
        TreeBatch(tokens, parent, depth, weight),
        torch.cat([growth.path, path], 1).gather(1, keep),
        read,
        torch.cat([growth.drawn[:, :1], drawn], 1),
        weight.exp().sum(1) - best.log_weight.exp().sum(1),
        growth.level + 1,
        growth.numbers + width,
        growth.request,
    )


def _level(candidates: Candidates, above: Tensor, depth: int, nodes: int) -> tuple[TreeBatch, Tensor]:
    """The best `nodes` candidates, below `above` [R, C], and their log path probabilities."""
    value, index = candidates.value.sort(dim=1, descending=True, stable=True)  # ties to the earlier candidate
    value, index = value[:, :nodes], index[:, :nodes]
    missing = value == -torch.inf
    level = TreeBatch(
        candidates.tokens.gather(1, index).masked_fill(missing, EMPTY),
        above.gather(1, index).masked_fill(missing, -1),
        torch.full_like(index, depth).masked_fill(missing, 0),
        value,
    )
    return level, candidates.path.gather(1, index).masked_fill(missing, -torch.inf)


def finish(growth: Growth) -> Proposal:
    return Proposal(growth.best, growth.read, growth.drawn)
