"""Tokens of a batch, as drafts without a checkpoint read them."""

from typing import Any

from vllm_adaptive_tree.drafters import Texts


def token_history(batch: Any, states: Any) -> Texts:
    """Texts of vLLM's InputBatch; `states`: its RequestState, to which vLLM has appended the tokens of this step.

    The text of a request in the middle of its prompt is the whole prompt.
    """
    longest = 1 + int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max())
    longest = max(longest, int(states.prefill_len.np[batch.idx_mapping_np].max()))
    length = states.total_len.gpu[batch.idx_mapping].long()
    tokens = states.all_token_ids.gpu[:, :longest][batch.idx_mapping].long()
    prompt = states.prompt_len.gpu[batch.idx_mapping].long()
    return Texts(batch.req_ids, tokens, length.clamp(max=tokens.shape[1]), prompt)
