"""One verification: which tree each request of the batch brings, where its rows stand, and its attention metadata."""

from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.attention import TreeMetadata, TreeRows, VerifyKeys, native_metadata
from vllm_adaptive_tree.trees import TokenTree, TreeBatch, ancestors
from vllm_adaptive_tree.trees.tree_batch import EMPTY


class Verification:
    """The trees of one step, by their request's row in vLLM's batch. Host side of the V1 (CPU) path."""

    def __init__(self, trees: dict[int, TokenTree], row_start: list[int], row_count: list[int], computed: list[int]):
        """`row_start`, `row_count`, `computed` (tokens whose K/V is in the cache): one entry per request."""
        self.trees = trees
        self.row_start, self.row_count, self.computed = row_start, row_count, computed
        self.depths = {request: tree.depths for request, tree in trees.items()}
        self.levels = max((max(depths) for depths in self.depths.values() if depths), default=0)
        self.branching = [request for request, tree in trees.items() if not tree.is_chain]
        assert all(row_count[request] == 1 + len(trees[request]) for request in self.branching), "root and nodes"
        self.keys: list[tuple[VerifyKeys, list[str], Tensor]] = []  # per cache group: keys, layers, slot mapping

    def batch(self) -> TreeBatch:
        """The trees as tensors, one row for every request of the batch."""
        width = max((len(tree) for tree in self.trees.values()), default=1)
        requests = len(self.row_start)
        tokens = torch.full((requests, width), EMPTY)
        parent = torch.full((requests, width), -1)
        depth = torch.zeros(requests, width, dtype=torch.int64)
        for request, tree in self.trees.items():
            count = len(tree)
            tokens[request, :count] = torch.tensor(tree.tokens)
            parent[request, :count] = torch.tensor(tree.parents)
            depth[request, :count] = torch.tensor(self.depths[request])
        return TreeBatch(tokens, parent, depth, torch.zeros(requests, width))

    def write_positions(self, positions: Tensor) -> None:
        """position = root position + depth, in vLLM's flat buffer; slots stay linear."""
        for request in self.branching:
            first = self.row_start[request] + 1
            depths = torch.tensor(self.depths[request])
            positions[first : first + len(depths)] = self.computed[request] + depths

    def metadata(self, builder: Any, layers: list[str], block_size: int, native: Any) -> TreeMetadata:
        """Metadata of one attention group.

        Args:
            builder: vLLM's metadata builder of that group, for the native part.
            layers: the target's layers of that group.
            block_size: tokens per block in its block table.
            native: the CPUAttentionMetadata that vLLM built for the whole batch.
        """
        branching = set(self.branching)
        others = [request for request in range(len(self.row_start)) if request not in branching]
        trees = self._tree_rows()
        context = torch.tensor([self.computed[request] for request in self.branching])
        blocks = -(-int(context.max()) // block_size)
        keys = VerifyKeys(trees, native.block_table[self.branching, :blocks], block_size, context, self._mask())
        self.keys.append((keys, layers, native.slot_mapping))
        rows = torch.tensor([row for request in others for row in self._rows(request)], dtype=torch.int64)
        part = None
        if others:
            lengths = torch.tensor([self.row_count[request] for request in others], dtype=torch.int32)
            table, slots = native.block_table[others], native.slot_mapping[rows]
            part = native_metadata(builder, lengths, native.seq_lens[others], table, slots)
        return TreeMetadata(part, rows, trees, keys)

    def _rows(self, request: int) -> range:
        return range(self.row_start[request], self.row_start[request] + self.row_count[request])

    def _tree_rows(self) -> TreeRows:
        width = max(self.row_count[request] for request in self.branching)
        rows = [row for request in self.branching for row in self._rows(request)]
        places = [
            index * width + place
            for index, request in enumerate(self.branching)
            for place in range(self.row_count[request])
        ]
        return TreeRows(torch.tensor(rows), torch.tensor(places), (len(self.branching), width))

    def _mask(self) -> Tensor:
        """[R, T, T] bool over root and nodes: everyone sees the root, itself and its ancestors."""
        batch = self.batch()
        parent = batch.parent[self.branching]
        mask = torch.nn.functional.pad(ancestors(parent, levels=self.levels), (1, 0, 1, 0))
        mask[:, :, 0] = True
        width = max(self.row_count[request] for request in self.branching)
        return mask[:, :width, :width]
