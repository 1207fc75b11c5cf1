"""The target's own draws along the trees, by vLLM's sampler: one draw per emitted token, in the history of the path."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from vllm_adaptive_tree.engine.verification import Verification


class TargetDraws:
    """`draw` for `target_only`, over the logits of one verification.

    Each level samples the whole batch, because the sampler's processors are laid out by batch row; only rows that are
    still walking use their generators and extend their histories. `close` takes the histories back.
    """

    def __init__(self, sampler: Any, sampling: Any, logits: Tensor, step: Verification, token_limit: list[int | None]):
        """`token_limit`: per request, the most tokens it may emit in this step (None: no limit)."""
        self.sampler, self.sampling, self.logits = sampler, sampling, logits
        counts = [1 + len(step.trees[r]) if r in step.trees else 1 for r in range(len(step.row_start))]
        self.first = torch.tensor([0, *counts[:-1]]).cumsum(0)  # [R]: row of each request's root in `logits`
        self.limit = torch.tensor([len(logits) if limit is None else limit for limit in token_limit])
        self.drawn = 0
        self.logprobs: list[LogprobsTensors] = []
        self.extended: list[int] = []

    def __call__(self, node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.where(active, self.first + 1 + node, self.first)
        walking = set(active.nonzero().flatten().tolist())
        generators = {row: generator for row, generator in self.sampling.generators.items() if row in walking}
        sampling = dataclasses.replace(self.sampling, generators=generators, spec_token_ids=[[] for _ in self.first])
        output = self.sampler(self.logits[rows], sampling)
        token = output.sampled_token_ids[:, 0].long()
        if output.logprobs_tensors is not None:
            self.logprobs.append(output.logprobs_tensors)
        if self.sampling.output_token_ids:
            for row in walking:
                self.sampling.output_token_ids[row].append(int(token[row]))
                self.extended.append(row)
        self.drawn += 1
        return token, self.drawn < self.limit

    def close(self) -> LogprobsTensors | None:
        """Undo the histories; return the logprobs of all draws, [R * levels, ..], request by request."""
        for row in self.extended:
            self.sampling.output_token_ids[row].pop()
        if not self.logprobs:
            return None
        fields = (
            torch.stack(field, 1).flatten(0, 1) if field[0].numel() else field[0]
            for field in zip(*(part[:3] for part in self.logprobs), strict=True)
        )
        return LogprobsTensors(*fields)
