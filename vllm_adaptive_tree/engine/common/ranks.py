"""Tensor-parallel ranks agree by construction: rank 0 decides and broadcasts its decision."""

from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.nn.functional import pad
from vllm.distributed.parallel_state import get_tp_group

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.drafters import Frontier
from vllm_adaptive_tree.proposers import Proposal


def is_rank_0() -> bool:
    return bool(get_tp_group().rank_in_group == 0)


def num_ranks() -> int:
    return int(get_tp_group().world_size)


def from_rank_0(decision: Tensor) -> Tensor:
    """Rank 0's `decision`; every rank passes a tensor of the same shape."""
    group = get_tp_group()
    return decision if group.world_size == 1 else group.broadcast(decision.contiguous(), src=0)


def number_from_rank_0(decision: int) -> int:
    if get_tp_group().world_size == 1:
        return decision
    return int(from_rank_0(torch.tensor(decision, dtype=torch.int64)))


def object_from_rank_0(decision: Any) -> Any:
    """Rank 0's `decision`, anything that can be pickled."""
    group = get_tp_group()
    return decision if group.world_size == 1 else group.broadcast_object(decision, src=0)


def objects_of_all(mine: Any) -> list[Any]:
    """Argument of each rank, by rank; anything that can be pickled."""
    group = get_tp_group()
    objects: list[Any] = [mine] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(objects, mine, group=group.cpu_group)
    return objects


def sync_frontier(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
    """Rank 0's frontier on every rank, cut after its last used column, and True if a tree grows."""
    if get_tp_group().world_size > 1:
        tokens, parent = from_rank_0(torch.stack(frontier))
        frontier = Frontier(tokens, parent)
    used = np.flatnonzero((frontier.tokens.numpy() >= 0).any(axis=0))
    width = int(used[-1]) + 1 if len(used) else 0
    return Frontier(frontier.tokens[:, :width], frontier.parent[:, :width]), width > 0


def accepted_from_rank_0(accepted: Accepted, levels: int) -> Accepted:
    """`levels`: the largest depth of a tree; a walk may have ended earlier."""
    if get_tp_group().world_size == 1:
        return accepted
    missing = levels + 1 - accepted.tokens.shape[1]  # every rank passes the same shape
    tokens, nodes = from_rank_0(pad(torch.stack(accepted), (0, missing), value=-1))
    length = int((tokens >= 0).any(0).sum())
    return Accepted(tokens[:, :length], nodes[:, :length])


def proposal_from_rank_0(proposal: Proposal) -> Proposal:
    if get_tp_group().world_size == 1:
        return proposal
    tree = proposal.tree
    columns = from_rank_0(torch.cat([tree.tokens, tree.parent, tree.depth, proposal.read, proposal.num_planned], 1))
    tokens, parent, depth, read, planned = columns.split(
        [tree.tokens.shape[1]] * 4 + [proposal.num_planned.shape[1]], 1
    )
    log_weight = from_rank_0(tree.log_weight)
    cell = None if proposal.cell is None else from_rank_0(proposal.cell)
    chosen = None if proposal.chosen is None else from_rank_0(proposal.chosen.long()) > 0
    tree = tree._replace(tokens=tokens, parent=parent, depth=depth, log_weight=log_weight)
    return Proposal(tree, read, planned, cell, chosen)
