"""Heads on Model Runner V2 that read the target's hidden states: EAGLE, EAGLE-3, and MTP layers."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_prefill_inputs

from vllm_adaptive_tree.engine.drafts.registry import kind_in
from vllm_adaptive_tree.engine.v2.drafting import TargetOutput, TreeDrafting
from vllm_adaptive_tree.engine.v2.paged_draft import PagedDraft, only_roots
from vllm_adaptive_tree.engine.v2.unread_states import LONGEST, UnreadStates


def states_of(target: TargetOutput) -> Tensor:
    """[rows, H or more]: of the layers that the head reads, side by side, or the last."""
    return torch.cat(target.auxiliary, -1) if target.auxiliary else target.hidden


class HeadSpeculator(PagedDraft, EagleSpeculator):
    """Head whose row at a position has the target's hidden state there and the token after it, so the last accepted row
    is the root's. K/V of accepted tokens is computed again from those states; while it rests, they wait until it reads
    them.
    """

    shift = 1
    target_hidden: Tensor | None = None
    """Target's states of the rows that the next piece reads, [rows, H or more]."""
    unread: UnreadStates | None = None

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any, req_states: Any):
        EagleSpeculator.__init__(self, vllm_config, device)
        TreeDrafting.__init__(self, runner, req_states)
        self.combines = kind_in(self.options).combines_states

    def rest(self, target: TargetOutput) -> None:
        """Nothing is read while all that is new can wait. Prompts are read, and blocks of a request are complete before
        another shares them: that one has a prompt, and a request that leaves is read (`settle`)."""
        if not self._wait(target, np.ones(target.batch.num_reqs, dtype=bool)):
            self.catch_up(target, None)
            self.read(target)

    def _wait(self, target: TargetOutput, which: np.ndarray) -> bool:
        """Let the requests `which` [R] bool wait, and return True, if all that is new of them can. A KV connector would
        take what waits as it is."""
        if self.vllm_config.kv_transfer_config is not None:
            return False
        batch, unread, step = target.batch, self.waiting_room(target), self.accepted
        requests = batch.idx_mapping_np[which]
        verified = batch.num_tokens - batch.num_reqs  # nodes of the batch, where each request has one row besides
        most = 0 if step is None else min(verified, step[1].nodes.shape[1])
        if not only_roots(batch) or not unread.fits(requests, 1 + most):
            return False
        row = batch.query_start_loc[: batch.num_reqs, None].long()
        if step is not None and most:
            row = torch.cat([row, row + 1 + step[1].nodes[:, :most]], 1)
        index, num_sampled = batch.idx_mapping, target.num_sampled
        if not which.all():
            places = async_tensor_h2d(np.flatnonzero(which), device=self.device)
            row, index, num_sampled = row[places], index[places], num_sampled[places]
        end = self.states.num_computed_tokens.gpu[index]
        unread.keep(requests, index, end, num_sampled, row, states_of(target))
        return True

    def catch_up(self, target: TargetOutput, drafting: np.ndarray | None) -> np.ndarray | None:
        batch, unread = target.batch, self.unread
        if drafting is not None and not self._wait(target, ~drafting):
            drafting = None
        requests = np.arange(self.max_num_reqs) if drafting is None else batch.idx_mapping_np[drafting]
        if unread is not None and unread.count[requests].any():
            end = self.states.num_computed_tokens.gpu.clone()
            end[batch.idx_mapping] -= target.num_sampled
            self.missed = self._read_late(unread, requests, end)
            self.block_tables.gather_block_tables(batch.idx_mapping, batch.num_reqs_after_padding)
        return drafting

    @torch.inference_mode()
    def settle(self) -> None:
        if self.unread is not None and self.unread.count.any() and not self.off:
            self._read_late(self.unread, np.arange(self.max_num_reqs), self.states.num_computed_tokens.gpu)

    def forget(self, request: str) -> None:
        super().forget(request)
        if self.unread is not None and self.unread.count[self.states.req_id_to_index[request]]:
            self.settle()

    def _read_late(self, unread: UnreadStates, requests: np.ndarray, end: Tensor) -> int:
        """Read what waits of these requests, and return the number of its rows, padding included."""
        late = unread.take(requests, end, self.states.all_token_ids.gpu)
        request, row_start, end, place, tokens, states, sizes = late
        longest = np.full(len(sizes), self.max_model_len)
        metadata, slots = self.metadata_of(request, row_start, end, place, sizes, longest, self.late_slots)
        hidden = self.model.combine_hidden_states(states) if self.combines else states
        self.forward(tokens, place, metadata, hidden, slots)
        return len(place)

    @cached_property
    def late_slots(self) -> Tensor:
        """Buffer for slots: vLLM's own has those of the step."""
        return torch.empty_like(self.block_tables.slot_mappings)

    def waiting_room(self, target: TargetOutput) -> UnreadStates:
        """What waits; made while vLLM measures memory."""
        if self.unread is None:
            positions = min(LONGEST, self.max_num_tokens // self.max_num_reqs)
            self.unread = UnreadStates(self.max_num_reqs, positions, states_of(target))
        return self.unread

    def dummy_run(self, target: TargetOutput, *, without_attention: bool) -> None:
        super().dummy_run(target, without_attention=without_attention)
        if self.may_rest:
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
