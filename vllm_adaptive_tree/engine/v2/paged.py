"""Tree attention inside vLLM's GPU backends: our kernel over the paged cache, beside the backend's own."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.common.attention import TreeAttention
from vllm_adaptive_tree.trees.masks import ancestor_bits


class KernelTrees(NamedTuple):
    """A verification: the first Q requests of the batch bring trees, all others are the backend's."""

    native: Any  # of the whole batch; None where all requests bring trees
    block_table: Tensor  # [Q or more, B]
    row_start: Tensor  # [Q + 1] int32
    context: Tensor  # [Q] int32: tokens before each root
    ancestors: Tensor  # [rows, W] int64
    saved: dict[str, tuple[Tensor, Tensor]]  # layer -> key, value of the trees' rows

    @classmethod
    def of(
        cls, native: Any, row_start: Tensor, root: Tensor, parent: Tensor, rows: int, *, alone: bool
    ) -> "KernelTrees":
        """
        Args:
            native: what vLLM built for the whole batch.
            row_start: [Q + 1] int32, the first `rows` rows of the batch by request.
            root: [Q] positions of the roots.
            parent: [Q, N] of the trees' nodes.
            alone: the batch has no other requests.
        """
        row = torch.arange(rows, device=root.device)
        request = torch.searchsorted(row_start[1:].long(), row, right=True)
        bits = ancestor_bits(parent)[request, row - row_start[request]]
        return cls(None if alone else native, native.block_table, row_start, root.int(), bits, {})


class PagedTrees(TreeAttention):
    """Before FlashAttention of a GPU."""

    head_size: int

    def _verify(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, step: KernelTrees, out: Tensor
    ) -> Tensor:
        from vllm_adaptive_tree.attention.triton_tree import tree_attention

        rows = len(step.ancestors)
        step.saved[layer.layer_name] = key[:rows].clone(), value[:rows].clone()  # a graph may take their memory
        if step.native is not None:
            super().forward(layer, query, key, value, kv_cache, step.native, out)
        keys, values = self._split(kv_cache)
        where = step.block_table[: len(step.context)], step.row_start, step.context, step.ancestors
        tree_attention(query[:rows], keys, values, *where, self.scale, out[:rows])
        return out

    def gather(self, layer: Any, kv_cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        key, value = (part[block_table.long()].flatten(1, 2).transpose(1, 2).float() for part in self._split(kv_cache))
        return key, value

    def _split(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """[blocks, Hkv, block_size, 2 * D] -> key, value [blocks, block_size, Hkv, D]."""
        key, value = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return key, value

    ways: ClassVar[Mapping[type, Callable[..., Tensor]]] = {**TreeAttention.ways, KernelTrees: _verify}
