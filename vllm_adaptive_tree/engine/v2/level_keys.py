"""Side buffers for draft-node K/V on devices with kernels; the paged cache is read in place."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.attention.plan import AttentionPlan
from vllm_adaptive_tree.attention.triton_tree import OwnKeys, tree_attention
from vllm_adaptive_tree.engine.common.attention import TreeMetadata
from vllm_adaptive_tree.engine.targets.latents import is_latent
from vllm_adaptive_tree.engine.v2.attention import LayerShape
from vllm_adaptive_tree.trees.masks import WORD


class LevelKeys(TreeMetadata):
    """Metadata of draft forwards over levels. Its buffers are persistent, and made before vLLM sizes its cache.

    Every column of a level has a slot, counted from 0 over all levels; the root is in the cache. Nodes never enter the
    cache; accepted tokens are read again when the draft catches up.
    """

    def __init__(
        self, layers: Mapping[str, Any], widths: Sequence[int], levels: int, dtype: torch.dtype, device: torch.device
    ):
        """
        Args:
            layers: vLLM's attention layers of the draft, by name.
            widths: columns of a level for batches of 1, 2, .. requests.
            levels: most forwards over a level in a step.
        """
        self.levels = max(levels, 1)
        rows = max(requests * width for requests, width in enumerate(widths, 1))
        slot = torch.arange(max(widths) * self.levels, device=device)
        word = torch.arange(-(-len(slot) // WORD), device=device)
        itself = torch.ones_like(slot) << slot % WORD
        self.itself = torch.where(slot[:, None] // WORD == word, itself[:, None], 0)  # [S, words]
        self.seen = slot.new_zeros(len(widths) + rows * self.levels, len(word))
        """Visible slots of the batch [R, 1 + S, words], as bits: of the root, which sees none, and of every slot."""
        self.roots = torch.zeros(len(widths), dtype=torch.int32, device=device)
        self.keys: dict[str, Tensor] = {}
        """Of each layer [2, rows * levels, Hkv, D]: of the batch [R, S, Hkv, D]. Of latents, whose values are a part of
        their keys, [1, rows * levels, 1, D]."""
        self.plans: dict[str, list[AttentionPlan]] = {}  # of each layer, by the number of requests
        shared: dict[LayerShape, list[AttentionPlan]] = {}
        for name, layer in layers.items():
            shape, impl = LayerShape.of(layer), layer.impl
            parts, heads = (1, 1) if is_latent(layer) else (2, impl.num_kv_heads)
            self.keys[name] = torch.zeros(parts, rows * self.levels, heads, impl.head_size, dtype=dtype, device=device)
            if shape not in shared:
                of_width = {
                    width: AttentionPlan(rows, len(widths), *shape, dtype, device, rows_per_request=width)
                    for width in {*widths}
                }
                of_lanes = {plan.lanes: plan for plan in of_width.values()}
                shared[shape] = [of_lanes[of_width[width].lanes] for width in widths]
            self.plans[name] = shared[shape]

    def open(self, block_table: Tensor | None, root: Tensor, width: int) -> Self:
        """Begin trees of R requests with at most `width` columns a level; `block_table` [R, B], `root` [R] position of
        each root, which is in the cache. Without a table, while vLLM measures memory, attention returns zeros."""
        self.requests, self.slots, self.width, self.end = len(root), width * self.levels, 0, 0
        self.block_table, self.context = block_table, self.roots[: len(root)]
        torch.add(root, 1, out=self.context)
        self.words = -(-self.slots // WORD)
        seen = self.seen[: len(root) * (1 + self.slots)]
        self.visible = seen.view(len(root), 1 + self.slots, -1)[:, :, : self.words]
        self.visible[:, 0].zero_()
        return self

    def open_level(self, parent: Tensor) -> None:
        """Prepare the next forward, over W nodes a request below `parent` [R, W], counted as in `Frontier`."""
        width = parent.shape[1]
        if width != self.width:
            self.width = width
            self.row_start = torch.arange(0, self.requests * width + 1, width, dtype=torch.int32, device=parent.device)
            for plan in {plans[self.requests - 1] for plans in self.plans.values()}:
                plan.update(self.row_start, self.context)
        start, self.end = self.end, self.end + width
        assert self.end <= self.slots
        above = self.visible.gather(1, parent[:, :, None].expand(-1, -1, self.words))
        self.bits = above | self.itself[start : self.end, : self.words]
        self.visible[:, 1 + start : 1 + self.end] = self.bits

    def attend(
        self, impl: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, out: Tensor
    ) -> Tensor:
        if self.block_table is None:
            return out.zero_()
        start = self.end - self.width
        node_keys = self.keys[layer.layer_name][:, : self.requests * self.slots].unflatten(
            1, (self.requests, self.slots)
        )
        # 0 times a NaN of a dead row would be NaN.
        for whole, new in zip(node_keys, (key, value), strict=False):
            new = new.unflatten(0, (self.requests, self.width))
            torch.nan_to_num(new, nan=0.0, posinf=0.0, neginf=0.0, out=whole[:, start : self.end])
        keys, values, scales = impl.views(layer, kv_cache)
        nodes = node_keys.expand(2, -1, -1, keys.shape[2], -1)
        return tree_attention(
            *(query, keys, values, self.block_table, self.row_start, self.context, self.bits.flatten(0, 1)),
            *(impl.scale, out),
            plan=self.plans[layer.layer_name][self.requests - 1],
            own=OwnKeys(nodes[0], nodes[1], start),
            scales=scales,
        )
