"""Differences between the supported vLLM releases, each detected by its symbols and not by a version number."""

from dataclasses import fields
from typing import Any

from torch import Tensor
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.input_batch import InputBatch

ADMITTED = "num_admitted_draft_tokens" in {field.name for field in fields(InputBatch)}
MASKED_ENDS = hasattr(StructuredOutputManager, "_masked_reasoning_ends")


def reallocated(first_logits: Tensor, query_start_loc: Tensor, nodes: int) -> tuple[Any, ...]:
    """Values that vLLM unpacks from `reallocate_drafts`. From 0.33 on the last is a copy of each request's nodes on
    the host, for a sampler sharded over ranks: None, because such samplers are refused."""
    return (first_logits, query_start_loc, nodes, None) if ADMITTED else (first_logits, query_start_loc, nodes)


def mask_rows(nodes: int, num_speculative_tokens: int) -> int:
    """Rows of a grammar's masks for a request with so many draft tokens: one each, and the root's. From 0.33 on all
    requests have the same number."""
    return 1 + (num_speculative_tokens if MASKED_ENDS else nodes)


def masked_ends(manager: Any, request: Any) -> tuple[int, ...]:
    """Tokens that would end the reasoning of a request and that its grammar rejects: from 0.33 on it may not sample
    them."""
    tokens: tuple[int, ...] = manager._masked_reasoning_ends(request) if MASKED_ENDS else ()
    return tokens
