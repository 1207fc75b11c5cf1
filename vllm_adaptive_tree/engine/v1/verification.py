"""One verification: the tree of each request, its rows in the batch, its attention metadata, and the commit of K/V."""

from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.v1.attention import VerifyMetadata
from vllm_adaptive_tree.engine.v1.scratch import ScratchBlocks
from vllm_adaptive_tree.engine.v1.sequences import Sequences
from vllm_adaptive_tree.trees import TokenTree, TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY

NO_TREE = TokenTree((), ())


class Verification:
    """The trees of one step, by their request's row in vLLM's batch; on the host."""

    def __init__(self, trees: dict[int, TokenTree], row_start: list[int], row_count: list[int], computed: list[int]):
        """`row_start`, `row_count`, `computed` (tokens with K/V in the cache): one entry per request."""
        self.trees = trees
        self.row_start, self.row_count, self.computed = row_start, row_count, computed
        self.depths = {request: tree.depths for request, tree in trees.items()}
        self.levels = max((max(depths) for depths in self.depths.values() if depths), default=0)
        self.branching = {request: tree.branches() for request, tree in trees.items() if not tree.is_chain}
        assert all(row_count[request] == 1 + len(trees[request]) for request in self.branching), "root and nodes"
        self.groups: list[tuple[VerifyMetadata, list[str], Tensor]] = []  # per attention group: layers, slot mapping

    def batch(self) -> TreeBatch:
        """The trees as tensors, one row for every request of the batch."""
        width = max((len(tree) for tree in self.trees.values()), default=1)
        tokens, parent, depth = [], [], []
        for request in range(len(self.row_start)):
            tree = self.trees.get(request, NO_TREE)
            missing = width - len(tree)
            tokens.append([*tree.tokens, *[EMPTY] * missing])
            parent.append([*tree.parents, *[-1] * missing])
            depth.append([*self.depths.get(request, ()), *[0] * missing])
        whole = torch.tensor([tokens, parent, depth], dtype=torch.int64)  # also where width is 0
        return TreeBatch(whole[0], whole[1], whole[2], torch.zeros(len(tokens), width))

    def write_positions(self, positions: Tensor) -> None:
        """position = root position + depth, in vLLM's flat buffer; slots stay linear."""
        rows: list[int] = []
        values: list[int] = []
        for request in self.branching:
            first, root = self.row_start[request] + 1, self.computed[request]
            rows += range(first, first + len(self.depths[request]))
            values += [root + depth for depth in self.depths[request]]
        if rows:
            positions[rows] = torch.tensor(values, dtype=positions.dtype)

    def row_of(self, request: int, node: int) -> int:
        """Row of a node in the flat batch; -1 is the root."""
        return self.row_start[request] + 1 + node

    def metadata(self, builder: Any, layers: list[str], native: Any, scratch: ScratchBlocks) -> VerifyMetadata:
        """Metadata of one attention group.

        Args:
            builder: vLLM's metadata builder of that group.
            layers: the target's layers of that group.
            native: the CPUAttentionMetadata that vLLM built for the whole batch.
            scratch: blocks for the branches that are not a tree's first.
        """
        sequences = [Sequences(builder.block_size, scratch.count)]
        for request, (first, count) in enumerate(zip(self.row_start, self.row_count, strict=True)):
            if request in self.branching:
                sequences[0].add_first_branch(request, first, self.computed[request], self.branching[request][0])
            else:
                sequences[0].add(request, list(range(first, first + count)), self.computed[request] + count)
        for request, branches in self.branching.items():
            first, computed, tree = self.row_start[request], self.computed[request], self.trees[request]
            for branch in branches[1:]:
                path = tree.path_to(branch[-1])
                if not sequences[-1].fits(computed, len(path)):
                    sequences.append(Sequences(builder.block_size, scratch.count))
                sequences[-1].add_branch(request, first, computed, path, own=len(branch))
        rounds, rows, written = [], [0], [0]
        for one in sequences:
            rows.append(rows[-1] + len(one.rows))
            written.append(written[-1] + len(one.written))
            rounds.append(one.round(builder, native, slice(*rows[-2:]), slice(*written[-2:])))
        metadata = VerifyMetadata(
            rounds,
            torch.tensor([row for one in sequences for row in one.rows]),
            torch.tensor([row for one in sequences for row in one.written], dtype=torch.int64),
            {},
            scratch,
        )
        self.groups.append((metadata, layers, native.slot_mapping))
        return metadata

    def commit(self, nodes: Tensor, layers: dict[str, Any]) -> None:
        """Write the K/V of accepted nodes that are not in their final slots there, through the backend's own packing,
        before the scheduler can hash the block.

        Args:
            nodes: [requests, D + 1] accepted nodes of every request, -1 pads.
            layers: vLLM's static forward context, layer name -> Attention.
        """
        homes = {}  # row of an accepted node -> row that has its final slot
        for request, branches in self.branching.items():
            for place, node in enumerate(nodes[request].tolist()):
                if node >= 0 and branches[0][place : place + 1] != [node]:
                    homes[self.row_of(request, node)] = self.row_start[request] + 1 + place
        if not homes:
            return
        for metadata, names, slot_mapping in self.groups:
            places = {row: place for place, row in enumerate(metadata.written.tolist())}
            source, slots = [places[row] for row in homes], slot_mapping[list(homes.values())]
            for name in names:
                layer = layers[name]
                key, value = (saved[source] for saved in metadata.saved[name])
                layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
