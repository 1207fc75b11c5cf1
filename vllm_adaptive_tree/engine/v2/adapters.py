"""Which LoRA adapter acts on which row."""

import numpy as np
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu.lora_utils import LoraState


class Adapters(LoraState):
    """vLLM's takes each request for one row of logits, and a verification has one for every node."""

    def __init__(self, max_num_reqs: int):
        super().__init__(max_num_reqs=max_num_reqs)
        self.rows = np.ones(0, dtype=np.int32)  # [R] rows of logits of this step

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: np.ndarray, num_scheduled_tokens: np.ndarray
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        of_request, of_token, requests = super().make_lora_inputs(req_ids, idx_mapping, num_scheduled_tokens)
        return tuple(np.repeat(of_request, self.rows).tolist()), of_token, requests
