"""Heads on Model Runner V2 that read the target's hidden states: EAGLE, EAGLE-3, and MTP layers."""

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import prepare_prefill_inputs

from vllm_adaptive_tree.engine.v2.drafting import Roots, TargetOutput, TreeDrafting
from vllm_adaptive_tree.engine.v2.paged_draft import PagedDraft
from vllm_adaptive_tree.engine.v2.verification import Verification


class HeadSpeculator(PagedDraft, EagleSpeculator):
    """Its row at a position has the target's hidden state there and the token after it, so the last accepted row is the
    root's. It reads in every step, since those states are gone after it; K/V of accepted tokens is computed again from
    them.
    """

    path: Tensor | None = None
    """[rows]: of the target's rows in this step, the accepted ones after their roots; None: as they are."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any, req_states: Any):
        EagleSpeculator.__init__(self, vllm_config, device)
        TreeDrafting.__init__(self, runner, req_states)

    def verified(self, step: Verification, nodes: Tensor, batch: Any) -> None:
        self.path = step.path_rows(nodes, batch.num_tokens_after_padding)
        step.write_linear(batch.positions)

    def roots(self, target: TargetOutput) -> Roots:
        self.read(target)
        count = target.batch.num_reqs
        root = self.input_buffers.positions[:count]
        return self.begin(target.batch, root + 1, root, self.hidden_states[:count, None])

    def rest(self, target: TargetOutput) -> None:
        self.read(target)

    def read(self, target: TargetOutput, *, without_attention: bool = False) -> None:
        batch, hidden = target.batch, target.hidden
        if target.auxiliary:
            hidden = self.model.combine_hidden_states(torch.cat(target.auxiliary, -1))
        path, self.path = self.path, None
        self.hidden_states[: len(hidden)] = hidden if path is None else hidden[path]
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

    def forward(self, tokens: Tensor, positions: Tensor, metadata: Any, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Not by way of vLLM's buffers: a level may have more rows."""
        with (
            torch.inference_mode(),
            set_forward_context(metadata, self.vllm_config, num_tokens=len(tokens), slot_mapping={}),
        ):
            found = self.model(input_ids=tokens, positions=positions, hidden_states=given, inputs_embeds=None)
        return found if isinstance(found, tuple) else (found, found)
