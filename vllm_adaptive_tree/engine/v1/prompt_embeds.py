"""Prompts that are embeddings: no token of an earlier request counts as theirs."""

from typing import Any


def clear_stale_tokens(batch: Any) -> None:
    """Clear the places of embeddings in vLLM's InputBatch, which hold tokens of the row's last request, and make the
    sampling metadata again where penalties have read them."""
    stale = False
    for row in batch.req_prompt_embeds:
        prompt = slice(batch.num_prompt_tokens[row])
        tokens, places = batch.token_ids_cpu[row, prompt], ~batch.is_token_ids[row, prompt]
        stale |= bool(tokens[places].any())
        tokens[places] = 0
    if stale:
        batch.sampling_metadata = batch._make_sampling_metadata()
