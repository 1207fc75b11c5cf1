"""What one supported vLLM release does otherwise than another; everything else is the same in all of them."""

from dataclasses import fields
from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

ADMITTED = "num_admitted_draft_tokens" in {field.name for field in fields(InputBatch)}


def reallocated(first_logits: Tensor, query_start_loc: Tensor, nodes: int) -> tuple[Any, ...]:
    """What vLLM unpacks from `reallocate_drafts`. From 0.33 on the last is a copy of each request's nodes on the host,
    for a sampler that is sharded over ranks: None, because such samplers are refused."""
    return (first_logits, query_start_loc, nodes, None) if ADMITTED else (first_logits, query_start_loc, nodes)
