"""Continuations of a text merged into drafted trees: more nodes without another draft forward.

With a rule that samples from the target (`target_only`) any tree is lossless. `traversal` takes chosen nodes among
children drawn without replacement, if it is told which they are: one is known before any draw and stands where its
value puts it, and the draws behind it are those of other tokens. A token whose slot was worth as much stays a drawn
one, or its kind would tell what was drawn.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_adaptive_tree.drafters import Continuations
from vllm_adaptive_tree.proposers.base import Proposal
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY_SLOT

GOES_ON = 0.9
"""Probability that a text that has repeated one more token also repeats the next."""


class Merged(NamedTuple):
    """Trees of R requests with continuations in them."""

    proposal: Proposal
    level: Tensor  # [R, N]: `draft_levels`, and `without_own_draws`

    def first(self, requests: int) -> "Merged":
        return Merged(self.proposal.first(requests), self.level[:requests])

    def padded(self, nodes: int) -> "Merged":
        """With N = `nodes`: short continuations without a tree may have fewer."""
        more = nodes - self.level.shape[1]
        return Merged(self.proposal.padded(nodes), pad(self.level, (0, more))) if more else self


def merged(
    proposal: Proposal,
    continuations: Continuations,
    *,
    nodes: int,
    most: int,
    max_depth: int,
    own_draws: Tensor | None = None,
) -> Merged:
    """`merge`, and what a budget and a table of acceptance learn from. `own_draws` [R] bool: False for requests whose
    other children are drawn; None: there is none."""
    trees = merge(proposal, continuations, nodes=nodes, most=most, max_depth=max_depth)
    level = draft_levels(trees.tree, continuations)
    if own_draws is None:
        return Merged(trees, level)
    return Merged(counted(trees, among=~own_draws), without_own_draws(level, trees, among=~own_draws))


def merge(proposal: Proposal, continuations: Continuations, *, nodes: int, most: int, max_depth: int) -> Proposal:
    """Best `nodes` of R trees of at most `max_depth` levels, and of the continuations found for the same requests,
    which may be deeper. A node keeps its `most` best children.

    The value of a continuation's node is the weight of all continuations through it; of a node that is in the tree
    already, the larger of both values. Weights are probabilities: those of a request add up to at most 1. A node that a
    continuation has added, or moved before what the draft had there, is chosen.
    """
    tree, size, dtype = proposal.tree, proposal.read.shape[1], proposal.tree.log_weight.dtype
    requests, chains, length = continuations.tokens.shape
    chain, level = (torch.arange(count, device=tree.tokens.device) for count in (chains, length))
    alive = ((continuations.tokens >= 0) & (continuations.weight > 0)[:, :, None]).cumprod(2).bool()
    tokens = continuations.tokens.masked_fill(~alive, -1)
    same = (tokens[:, :, None] == tokens[:, None]) & alive[:, None]
    same = same.cumprod(3, dtype=torch.uint8)  # [R, M, M, K]: 1 with a prefix in common
    weight = (same * continuations.weight[:, None, :, None]).sum(2)
    worth = (weight.log() + level * math.log(GOES_ON)).to(dtype)
    first = same.argmax(2)  # [R, M, K]: the first continuation with this prefix has the node

    on = _on(tree, continuations)
    shared = ((on * continuations.weight[:, None]).sum(2).log() + (tree.depth - 1) * math.log(GOES_ON)).to(dtype)
    place = torch.where(on, chain * length + tree.depth[:, :, None] - 1, chains * length).flatten(1)
    node = torch.arange(size, device=place.device)[None, :, None].expand_as(on).flatten(1)
    known = torch.full_like(place[:, :1], -1).repeat(1, chains * length + 1).scatter(1, place, node)
    known = known[:, :-1].view(requests, chains, length)  # in the tree already

    slot = torch.where(known >= 0, known, size + first * length + level)
    new = alive & (known < 0) & (first == chain[:, None])
    columns = tokens, pad(slot, (1, 0), value=-1)[:, :, :-1], (1 + level).expand_as(slot), worth
    added = (torch.where(new, column, fill).flatten(1) for column, fill in zip(columns, EMPTY_SLOT, strict=True))
    drafted = *tree[:3], torch.maximum(tree.log_weight, shared)
    both = TreeBatch(*(torch.cat(pair, 1) for pair in zip(drafted, added, strict=True)))
    levels = max(max_depth, length)
    value = _below_parents(both.log_weight, both.parent, levels)
    drawn = pad(tree.log_weight, (0, chains * length), value=-torch.inf)
    if most < nodes:  # else it binds nowhere
        value = value.masked_fill(_earlier_siblings(value, both.parent) >= most, -torch.inf)
        value = _below_parents(value, both.parent, levels)
        gone = value == -torch.inf
        both = TreeBatch(*(column.masked_fill(gone, fill) for column, fill in zip(both, EMPTY_SLOT, strict=True)))
        proposal = _without(proposal, gone[:, :size])
    return _best(proposal, both._replace(log_weight=value), value > drawn, nodes)


def _below_parents(value: Tensor, parent: Tensor, levels: int) -> Tensor:
    """Log values [R, M] that exceed none of their ancestors', so that a sort keeps parents first."""
    above = parent
    for _ in range(levels.bit_length()):  # twice as far up each time
        before = above.clamp(min=0)
        value = torch.minimum(value, torch.where(above >= 0, value.gather(1, before), torch.inf))
        above = torch.where(above >= 0, above.gather(1, before), -1)
    return value


def _earlier_siblings(value: Tensor, parent: Tensor) -> Tensor:
    """Number of siblings [R, M] that are worth more, or as much and come first."""
    earlier = torch.ones(value.shape[1], value.shape[1], dtype=torch.bool, device=value.device).tril(-1)
    more = value[:, None] > value[:, :, None]
    before = more | ((value[:, None] == value[:, :, None]) & earlier)
    return (before & (parent[:, :, None] == parent[:, None])).sum(2)


def _without(proposal: Proposal, gone: Tensor) -> Proposal:
    """Proposal that has read and counts no node that is `gone` [R, N]."""
    read, cell = proposal.read.masked_fill(gone, -1), proposal.cell
    planned = proposal.num_planned.masked_fill(pad(gone, (1, 0)), 0)
    return proposal._replace(read=read, num_planned=planned, cell=None if cell is None else cell.masked_fill(gone, -1))


def counted(proposal: Proposal, among: Tensor) -> Proposal:
    """Trees in which no table learns from chosen nodes and later siblings: for the requests `among` [R] whose other
    children are drawn, after a chosen sibling these are accepted less often."""
    tree, chosen, cell = proposal.tree, proposal.chosen, proposal.cell
    if chosen is None or cell is None:
        return proposal
    siblings = tree.parent[:, :, None] == tree.parent[:, None]  # [R, N, N]
    after = (siblings & (chosen & tree.valid)[:, None]).tril().any(2)
    return proposal._replace(cell=cell.masked_fill(after & among[:, None], -1))


def draft_levels(tree: TreeBatch, continuations: Continuations) -> Tensor:
    """Number of levels that the draft has to run for each node of merged trees, [R, N]; 0 on a continuation."""
    return tree.depth.masked_fill(_on(tree, continuations).any(2), 0)


def without_own_draws(levels: Tensor, proposal: Proposal, among: Tensor) -> Tensor:
    """`draft_levels` for requests `among` [R] whose other children are drawn: there a drawn token needs its level even
    if the text has it too, or a budget that values the two apart would let a draw decide about itself."""
    drawn = among[:, None] if proposal.chosen is None else among[:, None] & ~proposal.chosen
    return torch.where(drawn, proposal.tree.depth, levels)


def _on(tree: TreeBatch, continuations: Continuations) -> Tensor:
    """[R, N, M] bool: True where a node is on a continuation."""
    _, chains, length = continuations.tokens.shape
    at = (tree.depth - 1).clamp(0, length - 1)[:, None].expand(-1, chains, -1)
    inside = (tree.valid & (tree.depth <= length))[:, :, None] & (continuations.weight > 0)[:, None]
    on = (continuations.tokens.gather(2, at).transpose(1, 2) == tree.tokens[:, :, None]) & inside
    above = tree.parent
    for _ in range((length - 1).bit_length()):  # twice as far up each time
        before = above.clamp(min=0)
        on = on & ((above < 0)[:, :, None] | on.gather(1, before[:, :, None].expand_as(on)))
        above = torch.where(above >= 0, above.gather(1, before), -1)
    return on


def _best(proposal: Proposal, tree: TreeBatch, chosen: Tensor, nodes: int) -> Proposal:
    """Proposal of the best `nodes`. Of equal values the earlier comes first, so parents do."""
    order = tree.log_weight.sort(dim=1, descending=True, stable=True).indices
    place = order.argsort(1)
    more = tree.tokens.shape[1] - proposal.read.shape[1]
    parent = torch.where(tree.parent >= 0, place.gather(1, tree.parent.clamp(min=0)), -1)
    columns = TreeBatch(tree.tokens, parent, tree.depth, tree.log_weight)
    read, planned = pad(proposal.read, (0, more), value=-1), pad(proposal.num_planned, (0, more))
    merged = TreeBatch(*(column.gather(1, order)[:, :nodes] for column in columns))
    first, rest = planned[:, :1], planned[:, 1:].gather(1, order)[:, :nodes]
    cell = proposal.cell
    if cell is not None:
        cell = pad(cell, (0, more), value=-1).gather(1, order)[:, :nodes]
    chosen = chosen.gather(1, order)[:, :nodes]
    return Proposal(merged, read.gather(1, order)[:, :nodes], torch.cat([first, rest], 1), cell, chosen)
