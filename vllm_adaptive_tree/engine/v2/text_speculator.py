"""Drafts without a checkpoint on Model Runner V2: they read the tokens of each request, on the device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import DRAFTERS, Rows, TextDrafter, Texts
from vllm_adaptive_tree.engine.v2.drafting import Roots, TargetOutput, TreeDrafting


class TextSpeculator(TreeDrafting):
    """All of a text is there in every step, so a step that drafts nothing reads nothing."""

    supports_mm_inputs = False
    draft_logits = None
    draft_token_confidence_probs = None

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any, req_states: Any):
        super().__init__(runner)
        self.states = req_states
        vocabulary = vllm_config.model_config.get_vocab_size()
        drafter = DRAFTERS.load(self.options.drafter)
        self.drafter: TextDrafter = drafter.build(self.options.lookup, vocabulary=vocabulary)

    def roots(self, target: TargetOutput) -> Roots:
        """vLLM has appended the tokens of this step to the texts; that of a request in the middle of its prompt is the
        whole prompt."""
        batch, states = target.batch, self.states
        longest = 1 + int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max())
        longest = max(longest, int(states.prefill_len.np[batch.idx_mapping_np].max()))
        length = states.total_len.gpu[batch.idx_mapping].long()
        tokens = states.all_token_ids.gpu[:, :longest][batch.idx_mapping].long()
        rows, state = self.drafter.begin(Texts(batch.req_ids, tokens, length.clamp(max=tokens.shape[1])))
        return Roots(rows, length - 1, state)

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        self.forwards += 1
        return self.drafter.grow(tokens, parent, state)

    def rest(self, target: TargetOutput) -> None:
        """Nothing to read."""

    def dummy_run(self, target: TargetOutput, *, without_attention: bool) -> None:
        """No model runs."""

    def forget(self, request: str) -> None:
        self.drafter.forget([request])

    def measure(self, rows: int) -> Callable[[], Any]:
        """In a text of the greatest length, of one token."""
        text = torch.zeros_like(self.states.all_token_ids.gpu[:1]).long()
        name = "measured"
        _, state = self.drafter.begin(Texts([name], text, torch.full_like(text[:, 0], text.shape[1])))
        self.drafter.forget([name])
        tokens = torch.zeros(1, rows, dtype=torch.int64, device=self.device)
        return lambda: self.drafter.grow(tokens, tokens, state)
