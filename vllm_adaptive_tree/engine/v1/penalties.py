"""Penalties on the rows of a tree: vLLM's, each row with the path to its node as the end of its history."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.trees import TokenTree


def penalise(rows: Tensor, tree: TokenTree, sampling: Any, request: int, output: list[int]) -> None:
    """Apply a request's penalties to the logits `rows` [1 + N, V] float32 of its root and nodes, in place: they concern
    the tokens of its text and its tree alone.

    Args:
        sampling: vLLM's SamplingMetadata of the batch.
        output: tokens of the request after its prompt, its root the last.
    """
    presence, frequency, repetition = (
        float(column[request])
        for column in (sampling.presence_penalties, sampling.frequency_penalties, sampling.repetition_penalties)
    )
    if (presence, frequency, repetition) == (0.0, 0.0, 1.0):
        return
    prompt, nodes = sampling.prompt_token_ids[request].numpy(), np.array(tree.tokens, np.int64)
    text = np.concatenate([prompt, np.array(output, np.int64), nodes])
    known, place = np.unique(text, return_inverse=True)
    in_prompt, in_output, of_node = np.split(place, [len(prompt), len(prompt) + len(output)])
    counts = np.zeros((1 + len(tree), len(known)), np.int64)
    counts[0] = np.bincount(in_output, minlength=len(known))
    for node, parent in enumerate(tree.parents):
        counts[1 + node] = counts[1 + parent]
        counts[1 + node, of_node[node]] += 1
    prompted = np.zeros(len(known), bool)
    prompted[in_prompt] = True

    real = (known >= 0) & (known < rows.shape[1])  # the batch's prompts are padded
    at, count = torch.from_numpy(known[real]), torch.from_numpy(counts[:, real])
    seen = count > 0
    logits = rows.index_select(1, at)
    scale = torch.where(seen | torch.from_numpy(prompted[real]), repetition, 1.0)
    logits *= torch.where(logits > 0, 1.0 / scale, scale)
    logits -= frequency * count
    logits -= presence * seen
    rows.index_copy_(1, at, logits)
