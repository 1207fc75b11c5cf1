"""Growth by value: of all candidates the n best are kept, whatever a method's value is.

Values never increase from a parent to its child. So the n best form a tree, a node that has fallen out of the n best so
far has no descendant that could enter, and its row is not drafted. Levels are put aside as they come; which of their
nodes make the tree, and in which order, is settled once, at the end.
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.proposers.base import Proposal, Proposer, Request
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY


class Candidates(NamedTuple):
    """The next level: C candidates of each request, no more than a tree has nodes, by value descending."""

    tokens: Tensor  # [R, C]
    above: Tensor  # [R, C]: column of the frontier below which it stands (0 for the children of the root)
    value: Tensor  # [R, C]: log value, by which nodes are kept and ordered; -inf where there is no candidate
    path: Tensor  # [R, C]: log probability of the path under the draft
    drawn: int  # how many children each node of the frontier was to get


class Level(NamedTuple):
    """Nodes of one depth, C of each request, as in `Candidates`."""

    tokens: Tensor
    parent: Tensor  # the drafter's number of it, 0 the root
    depth: Tensor
    value: Tensor
    path: Tensor


class Front(NamedTuple):
    """The columns of the frontier, those in use to the left, the best in front."""

    tokens: Tensor  # [R, W], EMPTY: unused
    parent: Tensor  # [R, W]
    value: Tensor  # [R, W], -inf: unused
    path: Tensor  # [R, W], -inf: unused


class Growth(NamedTuple):
    levels: tuple[Level, ...]  # behind n empty slots, which come before all that is worth nothing
    read: tuple[Tensor, ...]  # of each level but the last, the drafter's number of each node, -1: not read
    best: Tensor  # [R, n]: values of the n best so far, falling
    total: Tensor  # [R]: sum of these values
    expand: Tensor  # [R, C] bool: nodes of the last level whose children shall be drafted
    front: Front
    first: int  # the drafter's number of the frontier's first column
    drawn: int
    request: Request

    @property
    def level(self) -> int:
        return len(self.levels) - 1

    @property
    def nodes(self) -> int:
        return self.best.shape[1]


class BestFirst(Proposer):
    """A method says what its candidates are worth, and which nodes of a level are worth expanding."""

    @abstractmethod
    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        """Children of the frontier's first W columns, from their rows [R, W, V]."""

    def expand(self, level: Level, worst: Tensor, gain: Tensor) -> Tensor:
        """Nodes [R, C] of the last level that shall have children: no others than those that could enter the n best.

        Args:
            worst: [R, 1] value of the n-th best so far, -inf while there is room.
            gain: [R] growth of the sum of the n best by this level.
        """
        return level.value > worst

    def front(self, level: Level, expand: Tensor) -> Front:
        """The columns of the frontier, where the best of a level are expanded: they are in front already."""
        unused = ~expand
        value, path = (column.masked_fill(unused, -torch.inf) for column in (level.value, level.path))
        return Front(level.tokens.masked_fill(unused, EMPTY), level.parent, value, path)

    def begin(self, rows: Rows, *, nodes: int, request: Request) -> Growth:
        logits = rows.logits
        nothing = torch.full((len(logits), nodes), EMPTY, device=logits.device)
        zeros = torch.zeros_like(nothing)
        value = torch.full_like(nothing, -torch.inf, dtype=torch.promote_types(logits.dtype, torch.float32))
        root = torch.zeros_like(value[:, :1])
        empty = Level(nothing, zeros, zeros, value, value)
        front = Front(nothing[:, :1], zeros[:, :1], root, root)
        growth = Growth((empty,), (nothing,), value, root[:, 0], nothing[:, :0], front, 0, 0, request)
        return self._grown(growth, rows)

    def growing(self, growth: Growth) -> Tensor:
        if growth.level >= self.max_depth:
            return torch.zeros_like(growth.total, dtype=torch.bool)
        return growth.expand.any(1)

    def frontier(self, growth: Growth) -> Frontier:
        return Frontier(growth.front.tokens, growth.front.parent)

    def extend(self, growth: Growth, rows: Rows) -> Growth:
        assert rows.dead is not None
        column = growth.expand.cumsum(1).sub_(1)
        dead = rows.dead.gather(1, column.clamp(0, rows.dead.shape[1] - 1))
        number = column.add_(growth.first).masked_fill_(dead.logical_or_(~growth.expand), -1)
        return self._grown(growth._replace(read=(*growth.read, number)), rows)

    def _grown(self, growth: Growth, rows: Rows) -> Growth:
        """One level more, from the rows of the frontier; columns of dead ones count as unused."""
        logits, dead = rows.logits, rows.dead
        assert dead is not None
        known = growth.front.path[:, : dead.shape[1]].masked_fill(dead, -torch.inf)
        growth = growth._replace(front=growth.front._replace(path=known))
        tokens, above, value, path, drawn = self.candidates(growth, logits)
        depth = torch.full_like(tokens, len(growth.levels))
        level = Level(tokens, above + growth.first, depth, value, path)
        best = torch.cat([growth.best, value], 1).topk(growth.nodes).values
        total = best.exp().sum(1)
        expand = self.expand(level, best[:, -1:], total - growth.total)
        return Growth(
            levels=(*growth.levels, level),
            read=growth.read,
            best=best,
            total=total,
            expand=expand,
            front=self.front(level, expand),
            first=growth.first + logits.shape[1],
            drawn=drawn,
            request=growth.request,
        )

    def finish(self, growth: Growth) -> Proposal:
        """The n best of all levels. A stable sort keeps the older of two equals in front, so parents come first."""
        tokens, parent, depth, values, _ = zip(*growth.levels, strict=True)
        unread = growth.levels[0].tokens[:, : growth.expand.shape[1]]
        columns = torch.cat([*tokens, *parent, *depth, *growth.read, unread], 1).unflatten(1, (4, -1))
        value, order = torch.cat(values, 1).sort(dim=1, descending=True, stable=True)
        keep = order[:, : growth.nodes]
        token, above, deep, read = columns.gather(2, keep[:, None].expand(-1, 4, -1)).unbind(1)
        slots = torch.arange(growth.nodes, device=keep.device).expand_as(keep)
        slot = torch.full((len(keep), growth.first + 1), -1, device=keep.device)  # of each number; the root has none
        slot.scatter_(1, read % (growth.first + 1), slots)  # nodes that were not read share the last place
        tree = TreeBatch(token, slot.gather(1, above), deep, value[:, : growth.nodes])
        rooted = value[:, :1] > -torch.inf  # a dead root has no children
        return Proposal(tree, read, torch.cat([rooted, read >= 0], 1) * growth.drawn)


def ranked(candidates: Candidates, nodes: int) -> Candidates:
    """The best `nodes` of any number of candidates in any order; ties to the earlier."""
    value, index = candidates.value.sort(dim=1, descending=True, stable=True)
    value, index = value[:, :nodes], index[:, :nodes]
    tokens, above, path = (column.gather(1, index) for column in (candidates.tokens, candidates.above, candidates.path))
    return Candidates(tokens, above, value, path, candidates.drawn)
