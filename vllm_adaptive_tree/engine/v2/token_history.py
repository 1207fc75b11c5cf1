"""Tokens of a batch, as drafts without a checkpoint read them."""

from typing import Any

from vllm.v1.worker.gpu.states import RequestState

from vllm_adaptive_tree.drafters import Texts

DENSE = 1 << 29
"""Bytes of all texts up to which they are in the device's memory; above it stays vLLM's default, the host's."""


def states_of_look_ups(*, max_num_reqs: int, max_model_len: int, **kwargs: Any) -> RequestState:
    """vLLM's request states for look-ups, which read whole texts."""
    dense = {"use_dense_all_token_ids": 4 * max_num_reqs * max_model_len <= DENSE}
    return RequestState(max_num_reqs=max_num_reqs, max_model_len=max_model_len, **kwargs | dense)


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
