"""Independent draft model: it reads tokens alone, and may read them later than the target."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from vllm_adaptive_tree.engine.common.coverage import Coverage
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, StepView, without_gaps
from vllm_adaptive_tree.engine.v1.paged_drafter import PagedDrafter


class ModelDrafter(PagedDrafter, DraftModelProposer):
    coverage: Coverage

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None):
        super().__init__(vllm_config, device, runner)
        self.begin_drafting(runner)

    def begin_cache(self, blocks: int) -> None:
        super().begin_cache(blocks)
        self.coverage = Coverage(blocks, self.block_table.block_size)

    def pending(self, step: StepView, accepted: Mapping[int, Sequence[int]]) -> list[CatchUp]:
        return step.new_tokens()

    def to_read(
        self, pending: list[CatchUp], room: int, drafting: bool, states: Sequence[Tensor] | None
    ) -> list[CatchUp]:
        return without_gaps(self.runner, self.coverage, pending, room, drafting)

    def inputs(self, items: list[CatchUp], states: Sequence[Tensor] | None) -> Tensor | None:
        return None
