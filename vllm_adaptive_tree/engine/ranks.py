"""Tensor-parallel ranks agree by construction: rank 0 decides, the others read its decision."""

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group


def from_rank_0(decision: Tensor) -> Tensor:
    """`decision` as rank 0 has it; every rank passes a tensor of the same shape."""
    group = get_tp_group()
    return decision if group.world_size == 1 else group.broadcast(decision.contiguous(), src=0)


def number_from_rank_0(decision: int) -> int:
    if get_tp_group().world_size == 1:
        return decision
    return int(from_rank_0(torch.tensor(decision, dtype=torch.int64)))
