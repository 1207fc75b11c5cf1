"""EAGLE, EAGLE-3 and MTP heads: at each position they read the target's state there and the token after it.

The target's states of accepted nodes replace the head's own, as in vLLM's chains. They wait until a tree needs them.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.engine.common.attention import TreeMetadata
from vllm_adaptive_tree.engine.drafts.registry import kind_in
from vllm_adaptive_tree.engine.startup.finish import tree_options
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp
from vllm_adaptive_tree.engine.v1.paged_drafter import PagedDrafter
from vllm_adaptive_tree.engine.v1.reads_states import ReadsStates
from vllm_adaptive_tree.engine.v1.shared_embedding import drop_adapters
from vllm_adaptive_tree.engine.v1.unread_states import Unread, states_of, unread_of
from vllm_adaptive_tree.trees import SlicedMask

FEW = 64
"""Most tokens that a request reads in one forward with its root; a prompt has a forward before, which ends once its K/V
is in the cache. A path is shorter, so the contexts that are kept grow by each."""


class HeadDrafter(ReadsStates, PagedDrafter, EagleProposer):
    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None):
        super().__init__(vllm_config, device, runner)
        self.begin_drafting(runner)
        self.combines = kind_in(tree_options(vllm_config)).combines_states

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        drop_adapters(self.model.model)

    def begin_cache(self, blocks: int) -> None:
        super().begin_cache(blocks)
        self.begin_waiting(in_any_order=len(self.layers) == 1)  # a second layer's depends on what the first reads

    def catch_up(
        self, items: list[CatchUp], states: Sequence[Tensor] | None, mask: SlicedMask | None
    ) -> tuple[Rows, Any | None]:
        """See `V1Drafter.catch_up`. The positions of a prompt before its root need K/V alone."""
        long = [item for item in items if len(item.tokens) > FEW]
        if self.unread is not None and states is not None and long:
            table = self.block_table
            before = [item._replace(tokens=item.tokens[:-1], states=item.states[:-1]) for item in long]
            self.read_keys(unread_of(before, states_of(before, states), table.block_table.np, table.block_size))
            items = [_root_of(item) if len(item.tokens) > FEW else item for item in items]
        return super().catch_up(items, states, mask)

    def read_keys(self, unread: Unread) -> None:
        """Write the K/V of a head of one layer: the forward ends at its attention."""
        inputs = self._combined(unread.states)
        with suppress(KeysWritten):
            self._forward(torch.tensor(unread.tokens), unread.positions, unread.slots, KeysAlone(), inputs)

    def inputs(self, items: list[CatchUp], states: Sequence[Tensor] | None) -> Tensor:
        if states is None:
            return torch.zeros(sum(len(item.tokens) for item in items), self.hidden_size, dtype=self.dtype)
        return self._combined(states_of(items, states))

    def _combined(self, states: Tensor) -> Tensor:
        combined: Tensor = self.model.combine_hidden_states(states) if self.combines else states
        return combined


def _root_of(item: CatchUp) -> CatchUp:
    """The last token of an item."""
    start = item.start + len(item.tokens) - 1
    return item._replace(start=start, tokens=item.tokens[-1:], states=item.states[-1:])


class KeysWritten(Exception):  # noqa: N818
    """Ends a forward once K/V is in the cache."""


class KeysAlone(TreeMetadata):
    """Metadata of a forward that only writes K/V, which vLLM's layer has done before it attends."""

    def attend(self, *_: Any) -> Tensor:
        raise KeysWritten
