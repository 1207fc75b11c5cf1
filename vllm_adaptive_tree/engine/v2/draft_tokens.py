"""Draft trees on their way to the scheduler, which asks for them where a batch has a grammar."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_adaptive_tree.engine.common.grammar import TreeTokens
from vllm_adaptive_tree.engine.v2.drafts import Drafts


class DraftTreesHandler(DraftTokensHandler):
    """vLLM's, which copies the tokens without a wait, with the parents in the same copy."""

    def __init__(self, device: torch.device, drafts: Drafts):
        super().__init__(device)
        self.drafts = drafts

    def set_draft_tokens(self, input_batch: Any, draft_tokens: Tensor) -> None:
        """`draft_tokens` [R, N]: of `drafts`, or -1."""
        parent = self.drafts.tree.parent[: len(draft_tokens), : draft_tokens.shape[1]]
        super().set_draft_tokens(input_batch, torch.stack([draft_tokens, parent.to(draft_tokens.dtype)], 2))

    def get_draft_tokens(self) -> DraftTokenIds | None:
        found = super().get_draft_tokens()
        if found is None or self.draft_tokens_np is None:
            return found
        trees = [TreeTokens([one for one, _ in row], [above for _, above in row]) for row in found.draft_token_ids]
        return DraftTokenIds(found.req_ids, trees)
