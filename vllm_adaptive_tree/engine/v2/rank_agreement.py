"""Check that tensor-parallel ranks verify the same trees: they agree if their logits do, and nothing is broadcast."""

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.engine.common.ranks import objects_of_all
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
from vllm_adaptive_tree.trees import TreeBatch

EVERY = 32
"""Verifications between checks; the ranks' hosts meet in the second step after each."""
FACTOR = 6364136223846793005


class RankAgreement:
    """Compares a checksum of trees and accepted paths. A rank that has drifted would corrupt the tokens of all."""

    def __init__(self) -> None:
        self.readback, self.steps = AsyncReadback(), 0

    def verified(self, tree: TreeBatch, accepted: Accepted) -> None:
        """Check one verification, on the device; every rank calls it in the same steps.

        Raises:
            RuntimeError: in an earlier verification the ranks had different trees or accepted different tokens.
        """
        if get_tp_group().world_size == 1:
            return
        self.readback.next_step()
        self.steps += 1
        if self.steps % EVERY == 0:
            parts = tree.tokens, tree.parent, accepted.tokens, accepted.nodes
            self.readback.send(torch.stack([checksum(part) for part in parts]), self._compare)

    def _compare(self, sums: Tensor) -> None:
        sums_of_ranks = objects_of_all(sums.tolist())
        differing = [rank for rank, rank_sums in enumerate(sums_of_ranks) if rank_sums != sums_of_ranks[0]]
        if differing:
            raise RuntimeError(
                f"Tensor-parallel ranks {differing} have other draft trees or accepted tokens than rank 0, so their "
                "K/V differ; restart the engine, and report which GPUs, drivers and libraries its ranks have"
            )


def checksum(numbers: Tensor) -> Tensor:
    """Checksum [] int64 of the values and their places; int64 wraps around."""
    place = torch.arange(1, 1 + numbers.numel(), device=numbers.device)
    return ((numbers.flatten().long() + 2) * place * FACTOR).sum()
