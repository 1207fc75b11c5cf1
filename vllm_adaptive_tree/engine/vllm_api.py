"""What one supported vLLM release does otherwise than another; everything else is the same in all of them."""

from dataclasses import fields
from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

ADMITTED = "num_admitted_draft_tokens" in {field.name for field in fields(InputBatch)}


def reallocated(first_logits: Tensor, query_start_loc: Tensor, nodes: int) -> tuple[Any, ...]:
    """What `reallocate_drafts` of an adaptive verification gives vLLM; from 0.33 on also the nodes of each request on the
    host, for a sampler that is sharded over ranks: none here, where that is refused."""
    return (first_logits, query_start_loc, nodes, None) if ADMITTED else (first_logits, query_start_loc, nodes)
