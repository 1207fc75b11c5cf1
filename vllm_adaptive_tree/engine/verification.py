"""One verification: which tree each request of the batch brings, where its rows stand, and its attention metadata."""

from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.cpu_attention import Round, VerifyMetadata, native_metadata
from vllm_adaptive_tree.trees import TokenTree, TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY

NO_TREE = TokenTree((), ())


class Verification:
    """The trees of one step, by their request's row in vLLM's batch. Host side of the V1 (CPU) path."""

    def __init__(self, trees: dict[int, TokenTree], row_start: list[int], row_count: list[int], computed: list[int]):
        """`row_start`, `row_count`, `computed` (tokens whose K/V is in the cache): one entry per request."""
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
        for request in self.branching:
            first = self.row_start[request] + 1
            depths = torch.tensor(self.depths[request])
            positions[first : first + len(depths)] = self.computed[request] + depths

    def standing(self, request: int) -> dict[int, int]:
        """Depth -> the node whose K/V stands in the slot of that depth once the walk is over."""
        return {self.depths[request][node]: node for branch in self.branching[request] for node in branch}

    def row_of(self, request: int, node: int) -> int:
        """Row of a node in the flat batch; -1 is the root."""
        return self.row_start[request] + 1 + node

    def metadata(self, builder: Any, layers: list[str], native: Any) -> VerifyMetadata:
        """Metadata of one attention group.

        Args:
            builder: vLLM's metadata builder of that group.
            layers: the target's layers of that group.
            native: the CPUAttentionMetadata that vLLM built for the whole batch.
        """
        order: list[int] = []
        nodes: list[int] = []
        rounds = []
        for turn in range(max(len(branches) for branches in self.branching.values())):
            requests, lengths, seq_lens, homes = [], [], [], []
            first_row, first_node = len(order), len(nodes)
            for request, (first, count) in enumerate(zip(self.row_start, self.row_count, strict=True)):
                if request not in self.branching:
                    own = list(range(first, first + count)) if turn == 0 else []
                    end = self.computed[request] + count
                elif turn < len(self.branching[request]):
                    branch = self.branching[request][turn]
                    own = [self.row_of(request, node) for node in branch]
                    nodes += own
                    depths = self.depths[request]
                    homes += [first + depths[node] for node in branch]  # its slot is that of the row at its depth
                    end = self.computed[request] + 1 + depths[branch[-1]]
                    own = [first, *own] if turn == 0 else own
                else:
                    own = []
                if own:
                    requests.append(request)
                    order += own
                    lengths.append(len(own))
                    seq_lens.append(end)
            slots = native.slot_mapping[order[first_row:]]
            rounds.append(
                Round(
                    slice(first_row, len(order)),
                    slice(first_node, len(nodes)),
                    native.slot_mapping[homes],
                    native_metadata(builder, lengths, seq_lens, native.block_table[requests], slots),
                )
            )
        metadata = VerifyMetadata(rounds, torch.tensor(order), torch.tensor(nodes), {})
        self.groups.append((metadata, layers, native.slot_mapping))
        return metadata
