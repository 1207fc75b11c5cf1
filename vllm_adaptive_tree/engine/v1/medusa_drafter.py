"""Medusa heads (arXiv 2401.10774): each predicts one depth from the target's last state, which knows no root."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.medusa import MedusaProposer

from vllm_adaptive_tree.drafters import ByDepth, Rows
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp
from vllm_adaptive_tree.engine.v1.one_forward import OneForwardDrafter
from vllm_adaptive_tree.trees import SlicedMask


class MedusaDrafter(OneForwardDrafter, MedusaProposer):
    layers: Collection[str] = ()
    lattice: ByDepth

    def __init__(self, vllm_config: Any, device: torch.device):
        super().__init__(vllm_config, device)
        self.begin_drafting(vllm_config)
        self.lattice = ByDepth()

    def begin_cache(self, blocks: int) -> None:
        """It has no K/V."""

    def due(self, news: list[CatchUp], room: int, drafting: bool) -> list[CatchUp]:
        """It reads a root's state alone."""
        return news if drafting else []

    def catch_up(
        self, items: list[CatchUp], states: Sequence[Tensor] | None, mask: SlicedMask | None
    ) -> tuple[Rows, Any | None]:
        """As `V1Drafter.catch_up`."""
        last = [item.states[-1] for item in items if item.root is not None]
        if not last or states is None:
            return Rows(torch.empty(0)), None
        (hidden,) = states
        return self.lattice.begin(torch.stack(self.model.compute_logits(self.model(hidden[last])), 1))

    def sample_state(self) -> Any:
        return self.lattice.begin(torch.zeros(1, self.levels, self.vocabulary))[1]
