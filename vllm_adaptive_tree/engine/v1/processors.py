"""vLLM's logits processors."""

import copy
from typing import Any

from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    build_logitsprocs,
)


def all_processors(vllm_config: Any, *args: Any) -> Any:
    """Processors of plain decoding, min_p and logit_bias among them; vLLM drops those with speculation."""
    plain = copy.copy(vllm_config)
    plain.speculative_config = None
    return build_logitsprocs(plain, *args)


def may_act(processor: Any) -> bool:
    """Return whether a processor may change this batch's logits; True for processors that are not vLLM's."""
    if isinstance(processor, LogitBiasLogitsProcessor):
        return bool(processor.biases)
    if isinstance(processor, MinPLogitsProcessor):
        return bool(processor.min_p_count)
    return bool(processor.min_toks) if isinstance(processor, MinTokensLogitsProcessor) else True


def may_change_more(processor: Any) -> bool:
    """Return whether a processor may change this batch's logits, and is not min-p."""
    return not isinstance(processor, MinPLogitsProcessor) and may_act(processor)


def of_requests(processor: MinPLogitsProcessor, requests: slice) -> MinPLogitsProcessor:
    """Copy of a processor of a batch, for any rows of one of its requests, or for a row of each."""
    own = copy.copy(processor)
    own.min_p = processor.min_p[requests]
    return own
