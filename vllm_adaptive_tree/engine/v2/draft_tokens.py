"""Draft trees for the scheduler, which asks for them where a batch has a grammar."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_adaptive_tree.engine.grammar.walk import TreeTokens
from vllm_adaptive_tree.engine.v2.drafts import Drafts


class DraftTreesHandler(DraftTokensHandler):
    """Handler that copies the parents with the tokens, in vLLM's copy, which the host does not wait for."""

    def __init__(self, device: torch.device, drafts: Drafts):
        super().__init__(device)
        self.drafts = drafts

    def set_draft_tokens(self, input_batch: Any, draft_tokens: Tensor) -> None:
        """`draft_tokens` [R, N]: of `drafts`, or -1."""
        if not input_batch.has_structured_output_reqs:  # the scheduler asks for none
            super().set_draft_tokens(input_batch, draft_tokens)
            return
        parent = self.drafts.tree.parent[: len(draft_tokens), : draft_tokens.shape[1]]
        if len(parent) < len(draft_tokens):  # a batch too large for trees
            parent = draft_tokens
        super().set_draft_tokens(input_batch, torch.stack([draft_tokens, parent.to(draft_tokens.dtype)], 2))

    def get_draft_tokens(self) -> DraftTokenIds | None:
        drafted = super().get_draft_tokens()
        if drafted is None or self.draft_tokens_np is None:
            return drafted
        trees = [
            TreeTokens([token for token, _ in row], [above for _, above in row]) for row in drafted.draft_token_ids
        ]
        return DraftTokenIds(drafted.req_ids, trees)
