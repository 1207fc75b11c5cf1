"""Drafts without a checkpoint on Model Runner V2: they read the tokens of each request, on the device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import Continuations, Rows, Texts
from vllm_adaptive_tree.drafters.lookup import Reading
from vllm_adaptive_tree.engine.v2.drafting import TargetOutput, TreeDrafting
from vllm_adaptive_tree.engine.v2.texts import texts


class TextSpeculator(TreeDrafting):
    """All of a text is there in every step, so a step that drafts nothing reads nothing."""

    supports_mm_inputs = False
    draft_logits = None
    draft_token_confidence_probs = None

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any, req_states: Any):
        super().__init__(runner, req_states)
        assert self.text is not None
        self.drafter = self.text

        self.captures = False  # its rows are as long as the texts
        self.texts: Texts | None = None
        """Of this step."""
        self.found: Continuations | None = None

    def read(self, target: TargetOutput) -> None:
        self.texts = texts(target.batch, self.states)

    def roots(self, requests: int) -> tuple[Rows, Any]:
        assert self.texts is not None
        rows, state = self.drafter.begin(self.texts)
        self.found = state.found if self.offers is not None and isinstance(state, Reading) else None
        return rows, state

    @property
    def found_by_draft(self) -> Continuations | None:
        return self.found

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        self.forwards += 1
        return self.drafter.grow(tokens, parent, state)

    def rest(self, target: TargetOutput) -> None:
        """Nothing to read."""

    def dummy_run(self, target: TargetOutput, *, without_attention: bool) -> None:
        """No model runs."""

    def forget(self, request: str) -> None:
        super().forget(request)
        self.drafter.forget([request])

    def measure(self, rows: int) -> Callable[[], Any]:
        """In a text of the greatest length, of one token."""
        text = torch.zeros_like(self.states.all_token_ids.gpu[:1]).long()
        name = "measured"
        length = torch.full_like(text[:, 0], text.shape[1])
        _, state = self.drafter.begin(Texts([name], text, length, length))
        self.drafter.forget([name])
        tokens = torch.zeros(1, rows, dtype=torch.int64, device=self.device)
        return lambda: self.drafter.grow(tokens, tokens, state)
