"""Limits of what a verification emits for each request, beyond what its tree has."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted


class Limits(NamedTuple):
    most: Tensor
    """[R] int64: most tokens to emit."""
    stops: Mapping[int, Collection[int | None]]
    """Tokens that end the walk of a row, if they are sampled."""

    def go_on(self, drawn: int, tokens: Tensor) -> Tensor:
        """[R] bool: requests that may emit more after `drawn` tokens, the last one `tokens` [R]."""
        goes_on = drawn < self.most
        for row, stops in self.stops.items():
            goes_on[row] &= int(tokens[row]) not in stops
        return goes_on

    def cut(self, paths: Accepted) -> Accepted:
        """`paths` as a walk emits them whose requests end after so many tokens."""
        level = torch.arange(paths.tokens.shape[1])
        tokens = torch.where(level < self.most[:, None], paths.tokens, -1)
        return Accepted(tokens, torch.where(level + 1 < self.most[:, None], paths.nodes, -1))

    @classmethod
    def of(cls, batch: Any, requests: Mapping[str, Any], acceptable: Mapping[str, int], levels: int) -> "Limits":
        """Limits of a batch.

        Up to `min_tokens` a step emits no token beyond them: the sampler lifts its ban on stop tokens between steps.
        Requests with their own generator draw nothing past a stop or `max_tokens`: a session of streaming input keeps
        its generator after them. After a fault of its grammar a request gets one token.

        Args:
            batch: vLLM's InputBatch.
            requests: vLLM's states, by name.
            acceptable: draft tokens of a request that may be accepted, if not all.
            levels: the largest depth of a tree.
        """
        most, stops = [], dict[int, set[int | None]]()
        for row, name in enumerate(batch.req_ids):
            params, emitted = requests[name].sampling_params, len(requests[name].output_token_ids)
            missing = params.min_tokens - emitted
            limit = min(missing if missing > 0 else levels + 1, 1 + acceptable.get(name, levels))
            if row in batch.generators:
                stops[row] = {params.eos_token_id, *(params.stop_token_ids or ())}
                if params.repetition_detection is not None:  # any token may stop it
                    limit = 1
                elif params.max_tokens is not None:
                    limit = max(1, min(limit, params.max_tokens - emitted))
            most.append(limit)
        return cls(torch.tensor(most), stops)
