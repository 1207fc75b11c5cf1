"""The differences between the supported vLLM releases, each told by what is there rather than by a version number."""

from dataclasses import fields
from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

ADMITTED = "num_admitted_draft_tokens" in {field.name for field in fields(InputBatch)}


def reallocated(first_logits: Tensor, query_start_loc: Tensor, nodes: int) -> tuple[Any, ...]:
    """The values that vLLM unpacks from `reallocate_drafts`. From 0.33 on the last is a copy of each request's nodes on
    the host, for a sampler sharded over ranks: None, because such samplers are refused."""
    return (first_logits, query_start_loc, nodes, None) if ADMITTED else (first_logits, query_start_loc, nodes)
