"""Heads on Model Runner V2 that read the target's hidden states: EAGLE, EAGLE-3, and MTP layers."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_prefill_inputs

from vllm_adaptive_tree.engine.drafts.registry import kind_in
from vllm_adaptive_tree.engine.v2.drafting import TargetOutput, TreeDrafting
from vllm_adaptive_tree.engine.v2.paged_draft import PagedDraft
from vllm_adaptive_tree.engine.v2.reads_states import ReadsStates, states_of
from vllm_adaptive_tree.engine.v2.unread_states import Late


class HeadSpeculator(ReadsStates, PagedDraft, EagleSpeculator):
    """Head whose row at a position has the target's hidden state there and the token after it, so the last accepted row
    is the root's. K/V of accepted tokens is computed again from those states; while it rests, they wait until it reads
    them.
    """

    shift = 1
    target_hidden: Tensor | None = None
    """Target's states of the rows that the next piece reads, [rows, H or more]."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any, req_states: Any):
        EagleSpeculator.__init__(self, vllm_config, device)
        TreeDrafting.__init__(self, runner, req_states)
        self.combines = kind_in(self.options).combines_states

    def read_late(self, late: Late) -> None:
        request, row_start, end, place, tokens, states, sizes = late
        longest = np.full(len(sizes), self.max_model_len)
        metadata, slots = self.metadata_of(request, row_start, end, place, sizes, longest, self.late_slots)
        hidden = self.model.combine_hidden_states(states) if self.combines else states
        self.forward(tokens, place, metadata, hidden, slots)

    def dummy_run(self, target: TargetOutput, *, without_attention: bool) -> None:
        super().dummy_run(target, without_attention=without_attention)
        if self.may_rest and self.may_wait:
            self.waiting_room(target)

    def stage_hidden_states(self, target: TargetOutput, rows: int) -> None:
        hidden = states_of(target)
        if self.target_hidden is None:
            self.target_hidden = hidden.new_zeros(len(self.inputs.source), hidden.shape[1])
        torch.index_select(hidden, 0, self.inputs.source[:rows], out=self.target_hidden[:rows])

    def hidden_inputs(self, rows: int) -> Tensor:
        assert self.target_hidden is not None
        hidden = self.target_hidden[:rows]
        return self.model.combine_hidden_states(hidden) if self.combines else hidden

    def feedback(self, requests: int) -> Tensor:
        """Hidden states of the roots, which vLLM's first forward leaves there, too."""
        return self.hidden_states[:requests]

    def read_natively(self, target: TargetOutput, *, without_attention: bool = False) -> None:
        batch, hidden = target.batch, states_of(target)
        if target.auxiliary:
            hidden = self.model.combine_hidden_states(hidden)
        if self.accepted is not None:
            step, path = self.accepted
            hidden = hidden[step.write_path(batch, path)]
        self.hidden_states[: len(hidden)] = hidden
        prepare_prefill_inputs(
            self.last_token_indices,
            self.current_draft_step,
            self.input_buffers,
            batch,
            target.num_sampled,
            target.num_rejected,
            target.last_sampled,
            target.next_prompt_tokens,
            self.max_num_reqs,
        )
        self._prefill(batch.num_reqs, batch.num_tokens_after_padding, target.metadata, target.slots, None)

    def forward(
        self, tokens: Tensor, positions: Tensor, metadata: Any, hidden_inputs: Tensor | None, slots: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run the model without vLLM's buffers: a level may have more rows."""
        with (
            torch.inference_mode(),
            set_forward_context(metadata, self.vllm_config, num_tokens=len(tokens), slot_mapping=slots),
        ):
            states = self.model(input_ids=tokens, positions=positions, hidden_states=hidden_inputs, inputs_embeds=None)
        return states if isinstance(states, tuple) else (states, states)
