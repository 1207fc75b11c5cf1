"""LoRA adapters of the rows of a verification."""

from typing import Any

import numpy as np
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState


class Adapters(LoraState):
    """Assigns adapters to rows. vLLM's class assumes one row of logits a request, and as many tokens as are scheduled.
    A verification has a row for every node, and an engine whose trees are switched off reads one token."""

    def __init__(self, max_num_reqs: int):
        super().__init__(max_num_reqs=max_num_reqs)
        self.rows = self.tokens = np.ones(0, dtype=np.int32)  # [R] of this step: rows of logits, tokens

    def verified(self, batch: Any) -> None:
        """Take the rows of the next step from its `batch`."""
        self.rows = np.diff(batch.cu_num_logits_np)
        self.tokens = np.diff(batch.query_start_loc_np[: batch.num_reqs + 1])

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: np.ndarray, num_scheduled_tokens: np.ndarray
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        of_request, of_token, requests = super().make_lora_inputs(req_ids, idx_mapping, self.tokens)
        return tuple(np.repeat(of_request, self.rows).tolist()), of_token, requests
