"""vLLM's thinking budgets, for samples at the nodes of trees."""

from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder


class ThinkingBudgets(ThinkingBudgetStateHolder):
    """Holder of vLLM's thinking states for trees. vLLM's advances with every call, one token at a time. This one is
    called with the histories of many nodes: it keeps the states after the committed tokens and advances copies of them,
    token by token.

    Its rows are requests, not draft tokens, and a request without a budget that moves into the row of a finished one
    does not inherit that one's budget, as it does in vLLM.
    """

    @classmethod
    def of(cls, vllm_config: Any, device: Any) -> "ThinkingBudgets | None":
        if vllm_config.reasoning_config is None:
            return None
        return cls(vllm_config.reasoning_config, vllm_config.scheduler_config.max_num_seqs, 0, device, False)

    def sync_batch(self, batch_update: Any) -> None:
        if not batch_update:
            return
        super().sync_batch(replace(batch_update, moved=()))
        for here, there, direction in batch_update.moved:
            moving, replaced = self._state.pop(here, None), self._state.pop(there, None)
            if moving is not None:
                self._state[there] = moving
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._state[here] = replaced

    def commit(self, histories: list[list[int]]) -> None:
        """Keep the states after `histories` [R]; every later history begins with these tokens."""
        self._state = self._after(histories)

    def update_state(self, output_token_ids: list[list[int]], *_: Any, **__: Any) -> None:
        self.advanced = self._after(output_token_ids)

    def apply_to_logits(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kept, self._state = self._state, self.advanced
        try:
            return super().apply_to_logits(logits, *args, **kwargs)
        finally:
            self._state = kept

    def _after(self, histories: list[list[int]]) -> dict[int, dict[str, Any]]:
        states = {row: dict(state) for row, state in self._state.items()}
        for row, state in states.items():
            for length in range(state.get("counted", -1) + 1, len(histories[row]) + 1):
                state.update(output_tok_ids=histories[row][:length], spec_token_ids=[], force_index=[], counted=length)
                self._update_think_state(state)
        return states
