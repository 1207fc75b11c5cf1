"""Drafts without a checkpoint on Model Runner V2: they read the tokens of each request, on the device."""

from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import Continuations, Rows, Texts
from vllm_adaptive_tree.drafters.lookup import LookupState
from vllm_adaptive_tree.engine.v2.drafting import TargetOutput, TreeDrafting
from vllm_adaptive_tree.engine.v2.token_history import token_history


class TextSpeculator(TreeDrafting):
    """Speculator that finds the whole text in every step, so it reads nothing in one that drafts nothing."""

    supports_mm_inputs = False
    draft_logits = None
    draft_token_confidence_probs = None

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any, req_states: Any):
        super().__init__(runner, req_states)
        assert self.text is not None
        self.drafter = self.text
        self.texts: Texts | None = None
        """Texts of this step."""
        self.continuations: Continuations | None = None

    @property
    def capturable(self) -> bool:
        """Its own rows are as long as the texts."""
        return self.pair.looks_up and self.merges is not None

    def read(self, target: TargetOutput) -> None:
        self.texts = token_history(target.batch, self.states)

    def roots(self, requests: int) -> tuple[Rows, Any]:
        assert self.texts is not None
        rows, state = self.drafter.begin(self.texts)
        self.continuations = state.continuations if self.offers is not None and isinstance(state, LookupState) else None
        return rows, state

    @property
    def draft_continuations(self) -> Continuations | None:
        return self.continuations

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        self.forwards += 1
        return self.drafter.grow(tokens, parent, state)

    def rest(self, target: TargetOutput) -> None:
        """Do nothing: there is nothing to read."""

    def dummy_run(self, target: TargetOutput, *, without_attention: bool) -> None:
        """Do nothing: no model runs."""

    def forget(self, request: str) -> None:
        super().forget(request)
        self.drafter.forget([request])
