"""Logits processors as users write them: none of the last few tokens may be repeated."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor


def last(params: Any) -> int:
    return int((params.extra_args or {}).get("last", 0))


class NoRepeat(AdapterLogitsProcessor):
    """Processor of Model Runner V1."""

    @classmethod
    def validate_params(cls, params: Any) -> None:
        if last(params) < 0:
            raise ValueError("last is negative")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        count = last(params)

        def process(output_ids: list[int], logits: Tensor) -> Tensor:
            logits[output_ids[-count:]] = -torch.inf
            return logits

        return process if count else None


class Counting(NoRepeat):
    """Processor that updates its state once a step."""

    def update_state(self, update: Any) -> None:
        super().update_state(update)


class NoRepeatV2(LogitsProcessor):
    """Processor of Model Runner V2: the tokens before a row are the request's, then those of the rows before it."""

    def __init__(self, vllm_config: Any, req_states: Any):
        self.states = req_states
        self.last = [0] * req_states.max_num_reqs

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self.last[req_idx] = last(sampling_params)
        return bool(self.last[req_idx])

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        request, local = ctx.expanded_idx_mapping.tolist(), ctx.expanded_local_pos.tolist()
        for row, (slot, before) in enumerate(zip(request, local, strict=True)):
            if self.last[slot]:
                prompt, total = int(self.states.prompt_len.np[slot]), int(self.states.total_len.gpu[slot])
                history = self.states.all_token_ids.gpu[slot, prompt:total].tolist()
                history += ctx.input_ids[row - before + 1 : row + 1].tolist()
                logits[row, history[-self.last[slot] :]] = -torch.inf
        return logits
