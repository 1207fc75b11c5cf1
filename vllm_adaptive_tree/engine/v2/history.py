"""vLLM's logits processors that read history, on all nodes of the trees at once, each at the end of its own path."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

from vllm_adaptive_tree.kernels.paths import PathWindows

SWITCHES: dict[type, dict[str, float]] = {
    PenaltiesState: {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    BadWordsState: {"num_bad_words": 0},
    ThinkingBudgetState: {"thinking_token_budget": -1},
}
"""Processor of vLLM -> its tables by request, with the number that switches each off."""
VLLM_PROCESSORS = LogitBiasState, PenaltiesState, BadWordsState
"""Any other is the user's."""
ALIGNED = 16
"""Numbers between two rows are a multiple, and rows of windows in one launch: Triton specialises kernels on that."""
MOST_BYTES = 1 << 27
"""Of logits that one launch processes."""


def readers(sampler: Any, requests: np.ndarray) -> list[Any]:
    """Processors that read the tokens before a row of one of these requests; on the host."""
    found = []
    if sampler.penalties_state.use_penalty[requests].any():
        found.append(sampler.penalties_state)
    for processor in sampler.logits_processors:
        if isinstance(processor, BadWordsState):
            if processor.num_bad_words.np[requests].any():
                found.append(processor)
        elif not isinstance(processor, VLLM_PROCESSORS) and sampler.needs_logits_processing[requests].any():
            found.append(processor)
    thinking = sampler.thinking_budget_state
    if thinking.enabled and thinking.use_thinking_budget[requests].any():
        found.append(thinking)
    return found


def along_paths(sampler: Any, found: list[Any], windows: PathWindows) -> Any:
    """Copy of vLLM's Sampler whose `found` processors take the window of a row for its history."""
    on_paths = {id(processor): OnPaths(processor, windows) for processor in found}
    sampler = copy.copy(sampler)
    sampler.logits_processors = [on_paths.get(id(one), one) for one in sampler.logits_processors]
    thinking = sampler.thinking_budget_state
    sampler.thinking_budget_state = on_paths.get(id(thinking), thinking)
    return sampler


class OnPaths:
    """A processor of vLLM's. Its kernels take the `place` rows before a row for the path to it, and find the row's
    logits by a stride. So each row has a window, in whose last row alone there are logits: the stride is that part of
    a row of logits that a row is of its window. The other rows are of nobody, for whom the processor is switched off,
    and kernels leave them alone."""

    def __init__(self, processor: Any, windows: PathWindows):
        self.processor, self.windows = copy.copy(processor), windows
        for name, off in SWITCHES[type(processor)].items():
            table = getattr(processor, name)
            longer = torch.cat([table.gpu, table.gpu.new_full((1,), off)])
            setattr(self.processor, name, SimpleNamespace(np=table.np, gpu=longer))

    def apply(self, logits: Tensor, context: Any) -> Tensor:
        """As vLLM's, in place; logits [rows, V]."""
        length, vocabulary = self.windows.length, logits.shape[1]
        stride = -(-vocabulary // (length * ALIGNED)) * ALIGNED
        size = length * stride
        before = (length - 1) * stride
        most = max(1, MOST_BYTES // (size * logits.element_size() * ALIGNED)) * ALIGNED
        for first in range(0, len(logits), most):
            part = logits[first : first + most]
            numbers = logits.new_empty(before + len(part) * size)
            rows = numbers[before:].view(len(part), size)[:, :vocabulary]
            rows.copy_(part)
            inside = slice(first * length, (first + len(part)) * length)
            tokens, place, request = (column[inside] for column in self.windows[:3])
            own = replace(context, input_ids=tokens, expanded_local_pos=place, expanded_idx_mapping=request)
            self.processor.apply(numbers.as_strided((len(part) * length, vocabulary), (stride, 1)), own)
            part.copy_(rows)
        return logits
