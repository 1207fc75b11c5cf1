"""Independent draft model on Model Runner V2: vLLM's own first forward, then level by level."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_adaptive_tree.engine.v2.catch_up import CatchUpSpeculator
from vllm_adaptive_tree.engine.v2.drafting import TargetOutput, TreeDrafting


class ModelSpeculator(CatchUpSpeculator):
    """Draft model whose row of a token gives the logits of the next one, so the root has a row of its own."""

    longest = 0
    """Most rows of a request in the first forward."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any, req_states: Any):
        StandaloneARSpeculator.__init__(self, vllm_config, device)
        TreeDrafting.__init__(self, runner, req_states)
        self.tokens = req_states.all_token_ids.gpu

    def _build_attn_metadata(self, *args: Any, query_start_loc_np: np.ndarray, **kwargs: Any) -> Any:
        """Build vLLM's metadata. If nodes are selected, the host knows only the sum of all rows; backends ask it for
        the longest query."""
        if self.selected:
            query_start_loc_np = query_start_loc_np.copy()
            query_start_loc_np[1:] = np.maximum(query_start_loc_np[1:], min(self.longest, query_start_loc_np[-1]))
        return super()._build_attn_metadata(*args, query_start_loc_np=query_start_loc_np, **kwargs)

    def read_natively(self, target: TargetOutput, *, without_attention: bool = False) -> None:
        batch = target.batch
        if self.accepted is not None:
            step, path = self.accepted
            step.write_path(batch, path)
        self.longest = 1 + int(batch.num_scheduled_tokens.max())
        self._prefill(batch, target.num_rejected, target.last_sampled, batch.num_reqs, without_attention, None)

    def _run_model(self, input_ids: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        """Run vLLM's model. It reads whole requests, also beyond the draft's context, where positions are clamped;
        nothing attends to those rows."""
        return super()._run_model(input_ids, positions.clamp(max=self.limit - 1), *rest)

    def forward(
        self, tokens: Tensor, positions: Tensor, metadata: Any, hidden_inputs: Tensor | None, slots: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        hidden = self._run_model(tokens, positions, metadata, slots, None)
        return hidden, hidden
