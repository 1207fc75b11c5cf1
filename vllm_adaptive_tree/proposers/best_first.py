"""Best-first growth: keep the n candidates of the highest value, for any method's definition of value.

Values never increase from a parent to its child. So the n best form a tree, and a node outside the n best so far has no
descendant that could enter: its row is not drafted. Levels are stored as they come; the nodes of the tree and their
order are chosen once, at the end.
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
    """The next level: C candidates per request, at most as many as a tree has nodes, by descending value."""

    tokens: Tensor  # [R, C]
    parent_column: Tensor  # [R, C]: its parent's column of the frontier (0 for children of the root)
    value: Tensor  # [R, C]: log value, by which nodes are kept and ordered; -inf: no candidate
    path: Tensor  # [R, C]: log probability of the path under the draft
    num_planned: int  # children planned for each node of the frontier
    cell: Tensor | None = None  # [R, C]: as in `Proposal`


class Level(NamedTuple):
    """The nodes of one depth, C per request, or those of them in the frontier: used columns first, the best leftmost.

    Unused columns have token EMPTY and value and path -inf.
    """

    tokens: Tensor  # [R, C]
    parent: Tensor  # [R, C]: the drafter's slot of it, 0 the root
    value: Tensor  # [R, C], as in `Candidates`
    path: Tensor  # [R, C]
    cell: Tensor | None = None  # [R, C]


class Growth(NamedTuple):
    levels: tuple[Level, ...]  # the first holds n empty slots, which sort before all candidates of value -inf
    read: tuple[Tensor, ...]  # of each level but the last: the drafter's slot of each node, -1: not read
    best: Tensor  # [R, n]: values of the n best so far, descending
    total: Tensor  # [R]: sum of these values
    expand: Tensor  # [R, C] bool: nodes of the last level to draft children for
    front: Level
    first: int  # the drafter's slot of the frontier's first column
    num_planned: int
    request: Request

    @property
    def level(self) -> int:
        return len(self.levels) - 1

    @property
    def nodes(self) -> int:
        return self.best.shape[1]


class BestFirst(Proposer):
    """Best-first proposer. A subclass defines the value of its candidates, and which nodes of a level to expand."""

    capturable = True

    @abstractmethod
    def candidates(self, growth: Growth, logits: Tensor) -> Candidates:
        """Children of the frontier's first W columns, from their logits [R, W, V]."""

    def expand(self, level: Level, worst: Tensor, gain: Tensor) -> Tensor:
        """Nodes [R, C] of the last level to expand: only those whose children could enter the n best.

        Args:
            worst: [R, 1] value of the n-th best so far, -inf while there are fewer.
            gain: [R] what this level added to the sum of the n best values.
        """
        return level.value > worst

    def front(self, level: Level, expand: Tensor) -> Level:
        """Columns of the frontier. Here the best of a level are expanded, and they come first already."""
        unused = ~expand
        value, path = (column.masked_fill(unused, -torch.inf) for column in (level.value, level.path))
        return Level(level.tokens.masked_fill(unused, EMPTY), level.parent, value, path)

    def begin(self, rows: Rows, *, nodes: int, request: Request) -> Growth:
        logits = rows.logits
        nothing = torch.full((len(logits), nodes), EMPTY, device=logits.device)
        zeros = torch.zeros_like(nothing)
        value = torch.full_like(nothing, -torch.inf, dtype=torch.promote_types(logits.dtype, torch.float32))
        root = torch.zeros_like(value[:, :1])
        empty = Level(nothing, zeros, value, value)
        front = Level(nothing[:, :1], zeros[:, :1], root, root)
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
        number = self.slots_read(growth, rows.dead)
        return self._grown(growth._replace(read=(*growth.read, number)), rows)

    def slots_read(self, growth: Growth, dead: Tensor) -> Tensor:
        """The drafter's slot of each node of the last level, [R, C]; -1: not read, or `dead` [R, W]."""
        column, width = growth.expand.cumsum(1).sub_(1), dead.shape[1]
        unread = dead.gather(1, column.clamp(0, width - 1)).logical_or_(~growth.expand).logical_or_(column >= width)
        return column.add_(growth.first).masked_fill_(unread, -1)

    def _grown(self, growth: Growth, rows: Rows) -> Growth:
        """Add a level from the rows of the frontier; columns of dead rows count as unused."""
        logits, dead = rows.logits, rows.dead
        assert dead is not None
        known = growth.front.path[:, : dead.shape[1]].masked_fill(dead, -torch.inf)
        growth = growth._replace(front=growth.front._replace(path=known))
        return self.with_level(growth, self.candidates(growth, logits), logits.shape[1])

    def with_level(self, growth: Growth, candidates: Candidates, width: int) -> Growth:
        """Add a level of candidates that the frontier's first `width` columns have, and choose what to expand."""
        tokens, parent_column, value, path, num_planned, cell = candidates
        level = Level(tokens, parent_column + growth.first, value, path, cell)
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
            first=growth.first + width,
            num_planned=num_planned,
            request=growth.request,
        )

    def finish(self, growth: Growth) -> Proposal:
        """Proposal of the n best nodes of all levels. The sort is stable: of equal values the earlier comes first, so
        parents do."""
        tokens, parent, values, _, cells = zip(*growth.levels, strict=True)
        depth = [torch.full_like(level, number) for number, level in enumerate(tokens)]
        unread = growth.levels[0].tokens[:, : growth.expand.shape[1]]
        celled = () if cells[-1] is None else (growth.levels[0].tokens, *cells[1:])
        columns = torch.cat([*tokens, *parent, *depth, *growth.read, unread, *celled], 1)
        value, order = torch.cat(values, 1).sort(dim=1, descending=True, stable=True)
        columns = columns.unflatten(1, (-1, order.shape[1]))
        keep = order[:, : growth.nodes]
        kept = columns.gather(2, keep[:, None].expand(-1, columns.shape[1], -1))
        token, parent_slot, deep, read, *cell = kept.unbind(1)
        nodes = torch.arange(growth.nodes, device=keep.device).expand_as(keep)
        slot = torch.full((len(keep), growth.first + 1), -1, device=keep.device)  # drafter slot -> node; the root: -1
        slot.scatter_(1, read % (growth.first + 1), nodes)  # nodes that were not read all write to the last entry
        tree = TreeBatch(token, slot.gather(1, parent_slot), deep, value[:, : growth.nodes])
        has_children = value[:, :1] > -torch.inf  # a dead root has no children
        num_planned = torch.cat([has_children, read >= 0], 1) * growth.num_planned
        return Proposal(tree, read, num_planned, cell[0] if cell else None)


def best_candidates(candidates: Candidates, nodes: int) -> Candidates:
    """The best `nodes` of any number of candidates in any order; ties to the earlier one."""
    value, index = candidates.value.sort(dim=1, descending=True, stable=True)
    value, index = value[:, :nodes], index[:, :nodes]
    tokens, column, _, path, num_planned, cell = candidates
    tokens, column, path = (part.gather(1, index) for part in (tokens, column, path))
    return Candidates(tokens, column, value, path, num_planned, None if cell is None else cell.gather(1, index))


def packed(level: Level, expand: Tensor) -> Level:
    """Columns of the nodes to `expand`, packed to the left; not sorted by path: a slot of lower value may hold a more
    probable token."""
    used, column = expand.sort(dim=1, descending=True, stable=True)
    tokens, parent, value, path = (x.gather(1, column) for x in level[:4])
    value, path = (x.masked_fill(~used, -torch.inf) for x in (value, path))
    return Level(tokens.masked_fill(~used, EMPTY), parent, value, path)
