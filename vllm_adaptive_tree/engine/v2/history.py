"""Logits processors that read history, at nodes of the trees, each at the end of its own path."""

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
    """Copy of vLLM's Sampler whose `found` processors take the window of a row of logits for its history."""
    on_paths = {id(processor): OnPaths(processor, windows) for processor in found}
    sampler = copy.copy(sampler)
    sampler.logits_processors = [on_paths.get(id(one), one) for one in sampler.logits_processors]
    thinking = sampler.thinking_budget_state
    sampler.thinking_budget_state = on_paths.get(id(thinking), thinking)
    return sampler


class OnPaths:
    """A processor applied to rows of logits, the window of each for its history."""

    def __init__(self, processor: Any, windows: PathWindows):
        self.processor, self.windows = processor, windows
        self.switches = SWITCHES.get(type(processor))
        if self.switches is not None:
            self.processor = copy.copy(processor)
            for name, off in self.switches.items():
                table = getattr(processor, name)
                longer = torch.cat([table.gpu, table.gpu.new_full((1,), off)])
                setattr(self.processor, name, SimpleNamespace(np=table.np, gpu=longer))

    def apply(self, logits: Tensor, context: Any) -> Tensor:
        """As vLLM's, in place; logits [rows, V]."""
        length = self.windows.length
        if self.switches is None:
            process, most = self._expanded, max(1, MOST_BYTES // (logits[:1].nbytes * length))
        else:
            process, most = self._overlapping, max(1, MOST_BYTES // logits[:ALIGNED].nbytes) * ALIGNED
        for first in range(0, len(logits), most):
            part = logits[first : first + most]
            window = slice(first * length, (first + len(part)) * length)
            process(part, window, replace(context, pos=context.pos[first : first + most]))
        return logits

    def _overlapping(self, logits: Tensor, window: slice, context: Any) -> None:
        """Apply one of vLLM's. Its kernels take the `place` rows before a row for the path to it, and find the logits
        of a row by a stride. So a row of logits lies where the last row of its window is, and the stride is that part
        of it that a row is of a window. The other rows are of nobody, for whom the processor is switched off: its
        kernels return before they read logits."""
        length, (rows, vocabulary) = self.windows.length, logits.shape
        stride = -(-vocabulary // (length * ALIGNED)) * ALIGNED
        before, size = (length - 1) * stride, length * stride
        numbers = logits.new_empty(before + rows * size)
        last = numbers[before:].view(rows, size)[:, :vocabulary]
        last.copy_(logits)
        tokens, place, request = (column[window] for column in self.windows[:3])
        own = replace(context, input_ids=tokens, expanded_local_pos=place, expanded_idx_mapping=request)
        self.processor.apply(numbers.as_strided((rows * length, vocabulary), (stride, 1)), own)
        logits.copy_(last)

    def _expanded(self, logits: Tensor, window: slice, context: Any) -> None:
        """Apply one of a user's, which may do anything with logits: to a copy of them in every row of the windows."""
        length, (rows, vocabulary) = self.windows.length, logits.shape
        tokens, place, request = (column[window] for column in self.windows[:3])
        places = place.view(rows, length)
        own = replace(
            context,
            input_ids=tokens,
            expanded_local_pos=place,
            expanded_idx_mapping=request.view(rows, length)[:, -1:].expand(-1, length).flatten(),
            pos=(context.pos[:, None] + places - places[:, -1:]).flatten(),
        )
        wide = self.processor.apply(logits[:, None].expand(-1, length, -1).reshape(rows * length, vocabulary), own)
        logits.copy_(wide.view(rows, length, vocabulary)[:, -1])
