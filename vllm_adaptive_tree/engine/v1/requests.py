"""Requests of a batch on Model Runner V1, as a step asks for them."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.common.request_flags import draws_from_target, is_greedy
from vllm_adaptive_tree.rng import CounterRNG


class HostRequests:
    """Requests with roots at these positions, `step.Requests`. `names`: of R requests of a `runner`."""

    def __init__(self, runner: Any, names: Sequence[str], positions: Sequence[int]):
        self.runner, self.names, self.positions = runner, names, positions
        self.states = [runner.requests[name] for name in names]

    @cached_property
    def greedy(self) -> Tensor:
        return torch.tensor([is_greedy(state.sampling_params) for state in self.states], dtype=torch.bool)

    @cached_property
    def flags(self) -> list[bool]:
        """[R]: True for requests that walk with the target's own draws."""
        pair, options = self.runner.pair, self.runner.options
        return [draws_from_target(state.sampling_params, pair, options) for state in self.states]

    @property
    def all_from_target(self) -> bool:
        return all(self.flags)

    @property
    def from_target(self) -> Tensor | None:
        return torch.tensor(self.flags) if any(self.flags) else None

    def rng(self, purpose: int) -> CounterRNG:
        return CounterRNG(self.runner.seeds.of(self.states), torch.tensor(self.positions), purpose)
