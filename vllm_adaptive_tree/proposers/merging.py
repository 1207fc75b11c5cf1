"""Continuations of a text merged into drafted trees: more nodes, and not one forward of the draft more.

Only where the rule samples from the target (`target_only`): there any tree is lossless. A rule for sampled children
would have to know that nobody sampled these.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_adaptive_tree.drafters import Continuations
from vllm_adaptive_tree.proposers.base import Proposal
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY_SLOT

GOES_ON = 0.9
"""Chance that a text that has gone on as before for one more token goes on so for another."""


def merge(proposal: Proposal, found: Continuations, *, nodes: int, max_depth: int) -> Proposal:
    """The best `nodes` of R trees, which are no deeper than `max_depth`, and of the continuations found for the same
    requests, which may be.

    A continuation's node is worth the weight of all continuations through it; one that is in the tree already is worth
    the larger of both. Weights are probabilities: those of a request add up to at most 1.
    """
    tree, size, dtype = proposal.tree, proposal.read.shape[1], proposal.tree.log_weight.dtype
    requests, chains, length = found.tokens.shape
    chain, level = (torch.arange(count, device=tree.tokens.device) for count in (chains, length))
    alive = ((found.tokens >= 0) & (found.weight > 0)[:, :, None]).cumprod(2).bool()
    tokens = found.tokens.masked_fill(~alive, -1)
    same = (tokens[:, :, None] == tokens[:, None]) & alive[:, None]
    same = same.cumprod(3, dtype=torch.uint8)  # [R, M, M, K]: which have a prefix in common
    weight = (same * found.weight[:, None, :, None]).sum(2)
    worth = (weight.log() + level * math.log(GOES_ON)).to(dtype)
    first = same.argmax(2)  # [R, M, K]: the first continuation with this prefix has the node

    on = _on(tree, found)
    shared = ((on * found.weight[:, None]).sum(2).log() + (tree.depth - 1) * math.log(GOES_ON)).to(dtype)
    place = torch.where(on, chain * length + tree.depth[:, :, None] - 1, chains * length).flatten(1)
    node = torch.arange(size, device=place.device)[None, :, None].expand_as(on).flatten(1)
    known = torch.full_like(place[:, :1], -1).repeat(1, chains * length + 1).scatter(1, place, node)
    known = known[:, :-1].view(requests, chains, length)  # in the tree already

    slot = torch.where(known >= 0, known, size + first * length + level)
    new = alive & (known < 0) & (first == chain[:, None])
    columns = tokens, pad(slot, (1, 0), value=-1)[:, :, :-1], (1 + level).expand_as(slot), worth
    own = (torch.where(new, one, fill).flatten(1) for one, fill in zip(columns, EMPTY_SLOT, strict=True))
    drafted = *tree[:3], torch.maximum(tree.log_weight, shared)
    both = TreeBatch(*(torch.cat(pair, 1) for pair in zip(drafted, own, strict=True)))
    value, above = both.log_weight, both.parent
    for _ in range(max(max_depth, length).bit_length()):  # no node is worth more than its parent: a sort keeps them so
        before = above.clamp(min=0)
        value = torch.minimum(value, torch.where(above >= 0, value.gather(1, before), torch.inf))
        above = torch.where(above >= 0, above.gather(1, before), -1)
    return _best(proposal, both._replace(log_weight=value), nodes)


def draft_levels(tree: TreeBatch, found: Continuations) -> Tensor:
    """[R, N]: how many levels the draft has to run for each node of merged trees; 0 for those on a continuation."""
    return tree.depth.masked_fill(_on(tree, found).any(2), 0)


def _on(tree: TreeBatch, found: Continuations) -> Tensor:
    """[R, N, M] bool: which nodes are on which continuations."""
    _, chains, length = found.tokens.shape
    at = (tree.depth - 1).clamp(0, length - 1)[:, None].expand(-1, chains, -1)
    inside = (tree.valid & (tree.depth <= length))[:, :, None] & (found.weight > 0)[:, None]
    on = (found.tokens.gather(2, at).transpose(1, 2) == tree.tokens[:, :, None]) & inside
    above = tree.parent
    for _ in range((length - 1).bit_length()):  # each time as far up again
        before = above.clamp(min=0)
        on = on & ((above < 0)[:, :, None] | on.gather(1, before[:, :, None].expand_as(on)))
        above = torch.where(above >= 0, above.gather(1, before), -1)
    return on


def _best(proposal: Proposal, tree: TreeBatch, nodes: int) -> Proposal:
    """Of equal values the earlier comes first, so parents do."""
    order = tree.log_weight.sort(dim=1, descending=True, stable=True).indices
    place = order.argsort(1)
    more = tree.tokens.shape[1] - proposal.read.shape[1]
    parent = torch.where(tree.parent >= 0, place.gather(1, tree.parent.clamp(min=0)), -1)
    columns = TreeBatch(tree.tokens, parent, tree.depth, tree.log_weight)
    read, planned = pad(proposal.read, (0, more), value=-1), pad(proposal.num_planned, (0, more))
    merged = TreeBatch(*(column.gather(1, order)[:, :nodes] for column in columns))
    first, rest = planned[:, :1], planned[:, 1:].gather(1, order)[:, :nodes]
    return Proposal(merged, read.gather(1, order)[:, :nodes], torch.cat([first, rest], 1))
