"""Persistent verification buffers on devices with kernels, so that CUDA graphs may read them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.attention.plan import AttentionPlan
from vllm_adaptive_tree.engine.v2.attention import KernelTrees, LayerShape
from vllm_adaptive_tree.kernels.commit import layer_addresses, move_accepted
from vllm_adaptive_tree.kernels.layout import Layout


def plans(
    layers: Mapping[str, Any],
    rows: int,
    requests: int,
    rows_per_request: int,
    dtype: torch.dtype,
    device: Any,
) -> dict[str, AttentionPlan]:
    """Plans of attention layers, by name; those of the same shape share one. Arguments as of `AttentionPlan`."""
    shapes = {name: LayerShape.of(layer) for name, layer in layers.items()}
    shared = {
        shape: AttentionPlan(rows, requests, *shape, dtype, device, rows_per_request=rows_per_request)
        for shape in {*shapes.values()}
    }
    return {name: shared[shape] for name, shape in shapes.items()}


class TargetBuffers:
    """Buffers of one runner; made when its layers are known, before vLLM sizes its cache."""

    def __init__(
        self, layers: Mapping[str, Any], requests: int, rows: int, nodes: int, dtype: torch.dtype, device: Any
    ):
        """
        Args:
            layers: vLLM's attention layers of the target, by name.
            rows: most rows of a batch.
            nodes: N.
        """
        self.layers = layers
        self.layout = Layout.empty(requests, rows, nodes, device)
        self.plans = plans(layers, rows, requests, 1 + nodes, dtype, device)
        self.caches: list[tuple[int, Tensor, Tensor]] = []

    def open_caches(self, groups: Mapping[str, int]) -> None:
        """`groups`: vLLM's cache group of each layer, whose cache has just been made."""
        same: dict[Any, list[Any]] = {}
        for name, layer in self.layers.items():
            cache = layer.kv_cache if layer.kv_cache.dim() == 4 else layer.kv_cache.unsqueeze(1)  # of latents
            same.setdefault((groups[name], cache.shape, cache.stride(), cache.dtype), []).append(cache)
        self.caches = [(key[0], layer_addresses(caches), caches[0]) for key, caches in same.items()]

    def metadata(self, name: str, others: Any, block_table: Tensor, row_start: Tensor, rows: int) -> KernelTrees:
        """Metadata of the layer `name`.

        Args:
            others: vLLM's, for requests that have no trees; None if there are none.
            block_table: [Q, B] of the requests that have, the first, as in `layout`.
            row_start: [Q + 1 or more] int32.
            rows: of these requests, and of padding.
        """
        count = len(block_table)
        where = block_table, row_start[: count + 1], self.layout.context[:count], self.layout.bits
        return KernelTrees(others, *where, rows, self.plans[name])

    def plan(self, row_start: Tensor, count: int) -> None:
        """Divide the work of this step's forward, once for all layers."""
        for plan in {id(plan): plan for plan in self.plans.values()}.values():
            plan.update(row_start[: count + 1], self.layout.context[:count])

    def commit(self, block_tables: list[Tensor], root: Tensor, nodes: Tensor) -> None:
        """Copy the K/V of the accepted `nodes` [R, L] (-1 pads) of all layers to the slots after the root."""
        for group, addresses, cache in self.caches:
            move_accepted(addresses, cache, block_tables[group], root, nodes)
