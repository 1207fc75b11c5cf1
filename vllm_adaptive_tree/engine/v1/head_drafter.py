"""EAGLE, EAGLE-3 and MTP heads: at each position they read the target's state there and the token after it.

The states are gone after the step, so a head reads in every step, and only growth may rest. What it reads of accepted
nodes replaces what it has said of them itself, as in vLLM's chains.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, Step
from vllm_adaptive_tree.engine.v1.paged_drafter import PagedDrafter
from vllm_adaptive_tree.engine.v1.shared_embedding import drop_adapters


class HeadDrafter(PagedDrafter, EagleProposer):
    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None):
        super().__init__(vllm_config, device, runner)
        self.begin_drafting(runner)

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        drop_adapters(self.model.model)

    def begin_cache(self, blocks: int) -> None:
        """Nothing is ever skipped."""

    def news(self, step: Step, accepted: Mapping[int, Sequence[int]]) -> list[CatchUp]:
        return step.new_states(accepted)

    def due(self, news: list[CatchUp], room: int, drafting: bool) -> list[CatchUp]:
        return news if drafting else [item._replace(root=None) for item in news]

    def inputs(self, items: list[CatchUp], states: Sequence[Tensor] | None) -> Tensor:
        if states is None:
            return torch.zeros(sum(len(item.tokens) for item in items), self.hidden_size, dtype=self.dtype)
        rows = [row for item in items for row in item.states]
        read = torch.cat([state[rows] for state in states], -1)
        combined: Tensor = self.model.combine_hidden_states(read) if self.method == "eagle3" else read
        return combined
