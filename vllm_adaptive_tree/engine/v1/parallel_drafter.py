"""P-EAGLE heads (arXiv 2602.01469): an EAGLE-3 head that predicts the depths below the first from mask tokens.

A mask token has a trained state in the place of the target's. Its row comes after the root's, sees the mask tokens
before it, and predicts the token of its depth, whatever the tokens between. In vLLM these rows are part of the forward
that reads what was accepted, and write K/V to the slots after the root; here that forward writes the cache as an
EAGLE-3 head's does, and a second one reads the mask tokens outside of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import ByDepth, Rows
from vllm_adaptive_tree.engine.drafts.parallel import as_vllm_drafts
from vllm_adaptive_tree.engine.startup.finish import tree_options
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp
from vllm_adaptive_tree.engine.v1.head_drafter import HeadDrafter
from vllm_adaptive_tree.trees import SlicedMask


class ParallelDrafter(HeadDrafter):
    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None):
        levels = tree_options(vllm_config).levels
        assert levels is not None
        super().__init__(as_vllm_drafts(vllm_config, vllm_config.speculative_config.method, levels), device, runner)
        self.masked = levels - 1
        """Mask tokens per tree."""
        self.lattice = ByDepth()

    def catch_up(
        self, items: list[CatchUp], states: Sequence[Tensor] | None, mask: SlicedMask | None
    ) -> tuple[Rows, Any | None]:
        """See `V1Drafter.catch_up`."""
        rows, state = super().catch_up(items, states, None)
        if state is None:
            return rows, None
        return self.lattice.begin(torch.cat([rows.logits, self._below(state.keys, 1 + state.root)], 1))

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        return self.lattice.grow(tokens, parent, state)

    def _below(self, keys: Any, first: Tensor) -> Tensor:
        """Logits [R, K - 1, V] of the depths from 2 on. `first` [R]: position of the first mask token."""
        keys.open_block(self.masked, causal=True)
        tokens = torch.full((first.numel() * self.masked,), self.parallel_drafting_token_id)
        positions = (first[:, None] + torch.arange(self.masked)).flatten()
        state = self.parallel_drafting_hidden_state_tensor
        assert state is not None
        hidden, _ = self._forward(tokens, positions, None, keys, state.expand(len(tokens), -1))
        logits: Tensor = self.model.compute_logits(hidden)
        return logits.unflatten(0, (len(first), self.masked))
