"""An independent draft model on Model Runner V2: vLLM's own first forward, then level by level."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.engine.common.attention import DraftKeys
from vllm_adaptive_tree.engine.common.contexts import PagedContexts
from vllm_adaptive_tree.engine.v2.catch_up import CatchUpSpeculator
from vllm_adaptive_tree.engine.v2.drafting import TreeDrafting


class ModelSpeculator(CatchUpSpeculator, TreeDrafting, StandaloneARSpeculator):
    """Satisfies `drafters.Drafter`. The draft's K/V of accepted tokens and of the root is in the paged cache, that of
    nodes outside it."""

    roots: Rows
    longest = 0
    """Rows of a request in the first forward, at most."""

    def sample_draft(self, hidden_states: Tensor, *rest: Any, **_: Any) -> Tensor:
        """vLLM asks for the first token of a chain; its logits are those of the root."""
        logits = self.compute_draft_logits(hidden_states, 0)
        self.roots = Rows(logits[:, None], hidden_states[:, None])
        return logits.argmax(-1)

    def _build_attn_metadata(self, *args: Any, query_start_loc_np: np.ndarray, **kwargs: Any) -> Any:
        """If nodes are selected, the host knows only the sum of all rows, and backends ask it for the longest query."""
        if self.budget is not None:
            query_start_loc_np = query_start_loc_np.copy()
            query_start_loc_np[1:] = np.maximum(query_start_loc_np[1:], min(self.longest, query_start_loc_np[-1]))
        return super()._build_attn_metadata(*args, query_start_loc_np=query_start_loc_np, **kwargs)

    def read(self, batch: Any, num_rejected: Tensor, last_sampled: Tensor, *, without_attention: bool) -> Rows:
        self.longest = 1 + int(batch.num_scheduled_tokens.max())
        self._prefill(batch, num_rejected, last_sampled, batch.num_reqs, without_attention, None)
        return self.roots

    def begin(self, batch: Any) -> tuple[Tensor, Any]:
        root = self.expanded_positions[self.last_token_indices[: batch.num_reqs]]
        block_size = self.kv_cache_config.kv_cache_groups[self.group].kv_cache_spec.block_size
        longest = 1 + int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max())
        blocks = -(-min(longest, self.max_model_len) // block_size)
        table = self.block_tables.input_block_tables[self.group][: batch.num_reqs, :blocks]
        keys = DraftKeys(PagedContexts(table, block_size), root + 1)
        return root, (keys, root, torch.zeros_like(root)[:, None])

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        """Read one level, `tokens` and `parent` [R, W] as in `Frontier`; unused columns cost their row too."""
        self.forwards += 1
        keys, root, depth = state
        new = depth.gather(1, parent) + 1
        keys.open_level(parent)
        positions = (root[:, None] + new).clamp(max=self.max_model_len - 1).flatten()
        metadata = dict.fromkeys(self.draft_attn_layer_names, keys)
        hidden = self._run_model(tokens.clamp(min=0).flatten().int(), positions, metadata, {}, None)
        logits = self.compute_draft_logits(hidden, 0).unflatten(0, tokens.shape)
        return Rows(logits, hidden.unflatten(0, tokens.shape)), (keys, root, torch.cat([depth, new], 1))
