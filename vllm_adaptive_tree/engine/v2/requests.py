"""Requests of a batch on Model Runner V2, as a step asks for them."""

from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_adaptive_tree.engine.common.request_flags import RequestFlags
from vllm_adaptive_tree.engine.v2.kernel_dispatch import counter_rng
from vllm_adaptive_tree.rng import CounterRNG


class DeviceRequests:
    """`step.Requests` of vLLM's InputBatch."""

    def __init__(self, flags: RequestFlags, batch: Any, seeds: Tensor, root: Tensor):
        """`seeds`: by vLLM's index of the request, on the device; `root` [R]: position of each root."""
        self.batch, self.seeds, self.root = batch, seeds, root
        self.flags: np.ndarray = flags.from_target[batch.idx_mapping_np]
        self.are_greedy: np.ndarray = flags.greedy[batch.idx_mapping_np]

    @property
    def all_from_target(self) -> bool:
        return bool(self.flags.all())

    @property
    def greedy(self) -> Tensor:
        return async_tensor_h2d(self.are_greedy, device=self.root.device)

    @cached_property
    def from_target(self) -> Tensor | None:
        return async_tensor_h2d(self.flags, device=self.root.device) if self.flags.any() else None

    def rng(self, purpose: int) -> CounterRNG:
        return counter_rng(self.seeds[self.batch.idx_mapping], self.root, purpose)
