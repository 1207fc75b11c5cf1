"""EAGLE, EAGLE-3 and MTP heads: at each position they read the target's state there and the token after it.

The target's states of accepted nodes replace the head's own, as in vLLM's chains. While the head rests, they are kept
until it reads them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_adaptive_tree.engine.drafts.registry import kind_in
from vllm_adaptive_tree.engine.startup.finish import tree_options
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, StepView
from vllm_adaptive_tree.engine.v1.paged_drafter import PagedDrafter
from vllm_adaptive_tree.engine.v1.shared_embedding import drop_adapters
from vllm_adaptive_tree.engine.v1.unread_states import UnreadStates, read_states


class HeadDrafter(PagedDrafter, EagleProposer):
    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None):
        super().__init__(vllm_config, device, runner)
        self.begin_drafting(runner)
        self.unread = UnreadStates()
        self.combines = kind_in(tree_options(vllm_config)).combines_states

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        drop_adapters(self.model.model)

    def forget(self, requests: Collection[str]) -> None:
        super().forget(requests)
        self.unread.forget(requests)

    def pending(self, step: StepView, accepted: Mapping[int, Sequence[int]]) -> list[CatchUp]:
        return step.new_states(accepted)

    def to_read(
        self, pending: list[CatchUp], room: int, drafting: bool, states: Sequence[Tensor] | None
    ) -> list[CatchUp]:
        shared = self.vllm_config.cache_config.enable_prefix_caching
        names, size = self.runner.input_batch.req_ids, self.block_table.block_size if shared else None
        return self.unread.to_read(pending, states, names, drafting=drafting, block_size=size)

    def inputs(self, items: list[CatchUp], states: Sequence[Tensor] | None) -> Tensor:
        if states is None:
            return torch.zeros(sum(len(item.tokens) for item in items), self.hidden_size, dtype=self.dtype)
        read = read_states(items, states)
        combined: Tensor = self.model.combine_hidden_states(read) if self.combines else read
        return combined
