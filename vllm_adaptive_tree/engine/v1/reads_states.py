"""Heads on Model Runner V1, whose K/V of a position is made of the target's state there."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, StepView
from vllm_adaptive_tree.engine.v1.contexts import KeptContexts
from vllm_adaptive_tree.engine.v1.short_wait import ShortWait
from vllm_adaptive_tree.engine.v1.unread_states import Unread, UnreadStates


class ReadsStates:
    """Mixin of such a head: what it reads when."""

    runner: Any
    contexts: KeptContexts
    block_table: Any
    """vLLM's BlockTable of the cache group that holds the head's layers."""
    waits: bool
    """False if it reads every step."""
    unread: UnreadStates | None = None
    """What waits until a tree needs it; None: it waits shortly."""
    short_wait: ShortWait

    def begin_waiting(self, *, in_any_order: bool) -> None:
        """Prepare for the cache, which now exists. `in_any_order`: K/V of a position depends on no other's.

        With several groups of layers a freed block may become another's, which a late reading would write to. With a
        KV connector nothing waits: it would take what has not been read.
        """
        runner = self.runner
        self.waits = runner.vllm_config.kv_transfer_config is None
        if in_any_order and self.waits and len(runner.kv_cache_config.kv_cache_groups) == 1:
            self.unread = UnreadStates(self.read_keys, runner.scheduler_config.max_num_batched_tokens)
        shares = runner.cache_config.enable_prefix_caching
        self.short_wait = ShortWait(self.block_table.block_size if shares else None)

    @abstractmethod
    def read_keys(self, unread: Unread) -> Any:
        """Write K/V of positions to the cache, in any order, whatever it holds before them."""

    def forget(self, requests: Collection[str]) -> None:
        self.contexts.forget(requests)
        self.short_wait.forget(requests)

    def pending(self, step: StepView, accepted: Mapping[int, Sequence[int]]) -> list[CatchUp]:
        return step.new_states(accepted)

    def to_read(self, pending: list[CatchUp], room: int, drafting: bool, states: Sequence[Tensor]) -> list[CatchUp]:
        if not self.waits:
            return pending if drafting else [item._replace(root=None) for item in pending]
        if self.unread is None:
            return self.short_wait.to_read(pending, states, self.runner.input_batch.req_ids, drafting=drafting)
        table = self.block_table
        return self.unread.to_read(pending, states, table.block_table.np, table.block_size, drafting=drafting)
