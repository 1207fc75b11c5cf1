"""Merge of continuations into trees token by token, which `proposers/merging.py` does at once."""

import torch
from torch.nn.functional import pad

from vllm_adaptive_tree.drafters import Continuations
from vllm_adaptive_tree.proposers.base import Proposal
from vllm_adaptive_tree.proposers.merging import GOES_ON
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY


def merge(proposal: Proposal, found: Continuations, *, nodes: int, max_depth: int) -> Proposal:
    tree, size = proposal.tree, proposal.read.shape[1]
    requests, chains, length = found.tokens.shape
    device = tree.tokens.device
    more = chains * length
    tokens, parent, depth, value = (
        pad(column, (0, more), value=fill) for column, fill in zip(tree, (EMPTY, -1, 0, -torch.inf), strict=True)
    )
    at = torch.full((requests, chains), -1, device=device)  # of each chain so far; -1: the root
    alive = found.weight > 0
    chain = torch.arange(chains, device=device)
    for level in range(length):
        token = found.tokens[:, :, level]
        alive = alive & (token >= 0)
        same = (at[:, :, None] == at[:, None]) & (token[:, :, None] == token[:, None]) & alive[:, None]
        weight = (same * found.weight[:, None]).sum(2)
        worth = (weight.log() + level * torch.tensor(GOES_ON).log().item()).masked_fill(~alive, -torch.inf)
        child = (tree.parent[:, None] == at[:, :, None]) & (tree.tokens[:, None] == token[:, :, None])
        own = size + torch.where(same, chain, chains).amin(2).clamp(max=chains - 1) * length + level
        slot = torch.where(child.any(2), child.int().argmax(2), own)
        known = torch.where(alive, slot, size + chain * length + level)  # of a chain that has ended: its own, unused
        kept = alive & (slot >= size)
        tokens.scatter_(1, known, torch.where(kept, token, tokens.gather(1, known)))
        parent.scatter_(1, known, torch.where(kept, at, parent.gather(1, known)))
        depth.scatter_(1, known, torch.where(kept, level + 1, depth.gather(1, known)))
        value.scatter_reduce_(1, known, worth.to(value.dtype), "amax")
        at = torch.where(alive, slot, at)
    for _ in range(max_depth):  # no node is worth more than its parent: a sort by value leaves parents before children
        value = torch.minimum(value, torch.where(parent >= 0, value.gather(1, parent.clamp(min=0)), torch.inf))
    order = value.sort(dim=1, descending=True, stable=True).indices
    place = order.argsort(1)
    parent = torch.where(parent >= 0, place.gather(1, parent.clamp(min=0)), -1)
    read, planned = pad(proposal.read, (0, more), value=-1), pad(proposal.num_planned, (0, more))
    columns = (column.gather(1, order)[:, :nodes] for column in (tokens, parent, depth, value))
    first, rest = planned[:, :1], planned[:, 1:].gather(1, order)[:, :nodes]
    return Proposal(TreeBatch(*columns), read.gather(1, order)[:, :nodes], torch.cat([first, rest], 1))
