"""Blocks after vLLM's KV cache, for the branches of trees while a layer attends."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor

COUNT = 128
"""Number of blocks in addition to those of the longest branch; pages of one layer, since layers take turns."""


class ScratchBlocks:
    """Scratch blocks after vLLM's single allocation for all layers; no block table of the scheduler points there.

    A layer counts blocks from its own start, so scratch block i is its block `first` + i, with a `first` of its own.
    """

    def __init__(self, count: int):
        self.count = count
        self.start = 0  # first byte after vLLM's own
        self.views: dict[str, tuple[Tensor, int]] = {}
        """Of each layer: its cache [first + count, Hkv, block_size, 2 * head_dim], scratch blocks included; `first`."""

    def extended(self, config: Any) -> Any:
        """vLLM's KVCacheConfig with room for the scratch blocks; the layers stay where they are."""
        config = deepcopy(config)
        tensors = config.kv_cache_tensors
        self.start = max((tensor.size for tensor in tensors), default=0)
        page = max((tensor.block_stride for tensor in tensors), default=0)
        for tensor in tensors:
            tensor.size += (self.count + 1) * page  # one more: blocks of this layer may not begin at `start`
        return config

    def begin_cache(self, caches: Mapping[str, Tensor]) -> None:
        """Look at the caches of these layers, which exist now."""
        for layer, cache in caches.items():
            page = cache.stride(0) * cache.element_size()
            first = -(-(self.start - cache.storage_offset() * cache.element_size()) // page)
            self.views[layer] = cache.as_strided((first + self.count, *cache.shape[1:]), cache.stride()), first
