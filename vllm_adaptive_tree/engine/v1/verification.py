"""One verification: the tree of each request, its rows in the batch, its attention metadata, and the commit of K/V."""

from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.engine.v1.attention import VerifyMetadata
from vllm_adaptive_tree.engine.v1.branches import Branches
from vllm_adaptive_tree.engine.v1.drafts import Draft, draft_probs
from vllm_adaptive_tree.engine.v1.scratch import ScratchBlocks
from vllm_adaptive_tree.engine.v1.sequences import Sequences
from vllm_adaptive_tree.trees import TokenTree, TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY

NO_TREE = TokenTree((), ())


class Verification:
    """Trees of one step, by their request's row in vLLM's batch; on the host."""

    def __init__(
        self,
        drafts: dict[int, Draft],
        row_start: list[int],
        row_count: list[int],
        computed: list[int],
        vocabulary: int,
    ):
        """`row_start`, `row_count`, `computed` (tokens with K/V in the cache): one entry per request."""
        trees = {request: draft.tree for request, draft in drafts.items()}
        self.drafts, self.trees, self.vocabulary = drafts, trees, vocabulary
        self.row_start, self.row_count, self.computed = row_start, row_count, computed
        self.groups: list[tuple[VerifyMetadata, list[str], Tensor]] = []  # per attention group: layers, slot mapping

    @cached_property
    def branches(self) -> Branches:
        """The trees, one after the other."""
        return Branches.of(self.parent, [len(tree) for tree in self.trees.values()])

    @cached_property
    def levels(self) -> int:
        return int(self.branches.depth.max(initial=0)) if self.trees else 0

    @cached_property
    def branching(self) -> dict[int, list[list[int]]]:
        """Branches of each tree with more than one."""
        if not self.trees:
            return {}
        branches = zip(self.trees, self.branches.lists(), strict=True)
        branching = {request: own for request, own in branches if len(own) > 1}
        assert all(self.row_count[request] == 1 + len(self.trees[request]) for request in branching), "root and nodes"
        return branching

    @cached_property
    def parent(self) -> NDArray[np.int64]:
        """[M]: parent of every node of all trees, one after the other, in its tree."""
        parents = chain.from_iterable(tree.parents for tree in self.trees.values())
        return np.fromiter(parents, np.int64, sum(map(len, self.trees.values())))

    @cached_property
    def row(self) -> NDArray[np.int64]:
        """[M]: row of each node's request."""
        return np.repeat(np.fromiter(self.trees, np.int64, len(self.trees)), np.diff(self.branches.start))

    @cached_property
    def sizes(self) -> list[int]:
        """[R]: nodes of each request."""
        return [len(self.trees.get(request, NO_TREE)) for request in range(len(self.row_start))]

    @cached_property
    def node(self) -> NDArray[np.int64]:
        """[M]: number of each node in its tree."""
        start = self.branches.start
        return np.arange(len(self.row)) - np.repeat(start[:-1], np.diff(start))

    @property
    def decodes(self) -> list[bool]:
        """[R]: True if only its root comes before a request's tree."""
        return [rows - nodes == 1 for rows, nodes in zip(self.row_count, self.sizes, strict=True)]

    @cached_property
    def tree(self) -> TreeBatch:
        """The trees as tensors, one row for every request of the batch."""
        width = max((len(tree) for tree in self.trees.values()), default=1)
        at, shape = (self.row, self.node), (len(self.row_start), width)
        tokens, parent, depth = np.full(shape, EMPTY), np.full(shape, -1), np.zeros(shape, np.int64)
        drafted = chain.from_iterable(tree.tokens for tree in self.trees.values())
        tokens[at] = np.fromiter(drafted, np.int64, len(self.row))
        parent[at], depth[at] = self.parent, self.branches.depth
        columns = map(torch.from_numpy, (tokens, parent, depth, np.zeros(shape, np.float32)))
        return TreeBatch(*columns)

    @property
    def max_children(self) -> int:
        return max((tree.max_fanout for tree in self.trees.values()), default=1)

    @property
    def initial(self) -> Tensor:
        drafts = (self.drafts.get(request) for request in range(len(self.row_start)))
        return torch.tensor([0 if draft is None else draft.initial for draft in drafts])

    @cached_property
    def chosen(self) -> Tensor | None:
        """See `step.Verification`."""
        if not any(len(draft.chosen) for draft in self.drafts.values()):
            return None
        chosen = torch.zeros_like(self.tree.valid)
        for request, draft in self.drafts.items():
            chosen[request, : len(draft.chosen)] = torch.as_tensor(draft.chosen)
        return chosen

    def rows_of(self, request: int) -> tuple[int, Tensor, NDArray[np.int64], NDArray[np.bool_]]:
        """Nodes of a request's tree; the distributions q [I, V] that its children were drawn from; the row of q of its
        root, then of each node, -1 for one that was never read; and which nodes a look-up has chosen."""
        draft = self.drafts.get(request)
        if draft is None:
            return 0, torch.zeros(1, self.vocabulary), np.full(1, -1), np.zeros(0, bool)
        size = len(draft.tree)
        chosen = np.asarray(draft.chosen) if len(draft.chosen) else np.zeros(size, bool)
        if draft.logits is None:  # the draft rests
            return size, torch.zeros(1, self.vocabulary), np.full(1 + size, -1), chosen
        return size, draft.all_probs(), draft.row, chosen

    def draft_probs(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """See `step.Verification`."""
        return draft_probs(self.drafts, node, self.vocabulary)

    def follow(self, best: list[int], first: list[int], most: list[int]) -> Accepted:
        """Walk all trees whose samples are known before the walk.

        Args:
            best: the sample of every row of the target's logits.
            first: [R] the row of each root in them.
            most: [R] tokens to emit at most.
        """
        paths = []
        for request, (root, limit) in enumerate(zip(first, most, strict=True)):
            tree = self.trees.get(request)
            paths.append([] if tree is None else tree.follow(best[root : root + 1 + len(tree)])[: limit - 1])
        length = 1 + max(map(len, paths))
        tokens = [
            [best[root + 1 + node] for node in (-1, *path)] + [-1] * (length - 1 - len(path))
            for root, path in zip(first, paths, strict=True)
        ]
        nodes = [path + [-1] * (length - len(path)) for path in paths]
        return Accepted(torch.tensor(tokens), torch.tensor(nodes))

    @cached_property
    def place(self) -> NDArray[np.int64]:
        """[M]: place of each node among the rows of its tree, which come depth first: each branch is consecutive rows,
        and the first one's slots are those of its depths."""
        branches = self.branches
        place, first = np.empty_like(branches.order), np.repeat(branches.start[:-1], np.diff(branches.start))
        place[first + branches.order] = np.arange(len(place)) - first
        return place

    def write_rows(self, tokens: NDArray[np.int32], positions: Tensor, logits_rows: Tensor) -> None:
        """Move the nodes of branching trees to their rows in vLLM's flat batch, where they are in generation order; a
        position becomes that of the root plus the depth, and slots stay linear. The target's logits stay in generation
        order.

        Args:
            tokens, positions: [rows] of the flat batch.
            logits_rows: [L] int: a row of the flat batch for each of the target's logits.
        """
        if not self.branching:
            return
        moved = np.arange(self.row_start[-1] + self.row_count[-1])
        start = 1 + np.array(self.row_start)[self.row]
        rows = moved[start + self.node] = start + self.place
        drafted, branching = tokens[start + self.node], np.repeat(~self.branches.chain, np.diff(self.branches.start))
        tokens[rows] = drafted
        depth = np.array(self.computed)[self.row] + self.branches.depth
        positions.numpy()[rows[branching]] = depth[branching]
        logits_rows.numpy()[:] = moved[logits_rows.numpy()]

    def row_of(self, request: int, node: int) -> int:
        """Row of a node in the flat batch; -1 is the root."""
        return self.rows[request][1 + node]

    @cached_property
    def rows(self) -> dict[int, list[int]]:
        """Rows of each tree's root and nodes in the flat batch."""
        place, rows = (1 + self.place).tolist(), {}
        for request, (begin, end) in zip(self.trees, pairwise(self.branches.start.tolist()), strict=True):
            first = self.row_start[request]
            rows[request] = [first, *(first + one for one in place[begin:end])]
        return rows

    def metadata(self, builder: Any, layers: list[str], native: Any, scratch: ScratchBlocks) -> VerifyMetadata:
        """Metadata of one attention group.

        Args:
            builder: vLLM's metadata builder of that group.
            layers: the target's layers of that group.
            native: the CPUAttentionMetadata that vLLM built for the whole batch.
            scratch: blocks for the branches that are not a tree's first.
        """
        sequences = [Sequences(builder.block_size, scratch.count)]
        for request, (count, computed) in enumerate(zip(self.row_count, self.computed, strict=True)):
            if request not in self.branching:
                sequences[-1].add(request, count, computed + count)
                continue
            own, *others = self.branching[request]
            sequences[-1].add(request, 1 + len(own), computed + 1 + len(own))
            for branch in others:
                path = [self.row_of(request, node) for node in (-1, *self.trees[request].path_to(branch[-1]))]
                if not sequences[-1].fits(computed, len(path) - 1):
                    sequences.append(Sequences(builder.block_size, scratch.count, sequences[-1].end))
                sequences[-1].add_branch(request, path, computed, len(branch))
        firsts = {name: scratch.views[name][1] for name in layers}
        metadata = VerifyMetadata([turn.round(builder, native, firsts) for turn in sequences], {}, scratch)
        self.groups.append((metadata, layers, native.slot_mapping))
        return metadata

    def commit(self, nodes: Tensor, layers: dict[str, Any]) -> None:
        """Write the K/V of accepted nodes to their final slots, unless already there, through the backend's own
        packing, before the scheduler can hash the block.

        Args:
            nodes: [requests, D + 1] accepted nodes of every request, -1 pads.
            layers: vLLM's static forward context, layer name -> Attention.
        """
        homes = {}  # row of an accepted node -> row that has its final slot
        for request in self.branching:
            for depth, node in enumerate(nodes[request].tolist(), 1):
                row, home = self.row_of(request, node), self.row_start[request] + depth
                if node >= 0 and row != home:
                    homes[row] = home
        if not homes:
            return
        rows, own = torch.tensor(list(homes)), list(homes.values())
        for metadata, names, slot_mapping in self.groups:
            slots = slot_mapping[own]
            for name in names:
                layer = layers[name]
                key, value = (part.index_select(0, rows) for part in metadata.saved[name])
                layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
