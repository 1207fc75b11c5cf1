"""One verification: the rows of the flat batch that are the nodes of its trees."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.engine.v2.attention import DenseTrees, packed_bits
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.drafts import DraftProbs, Drafts
from vllm_adaptive_tree.kernels import write_accepted
from vllm_adaptive_tree.kernels.layout import Layout
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.masks import ancestor_mask
from vllm_adaptive_tree.trees.orders import depth_first, permuted

IN_GENERATION_ORDER = 64
"""Nodes up to which a tree stays in generation order: of its one or two blocks of keys none could be skipped."""


class Verification(NamedTuple):
    """Trees of R requests. Their rows are laid out by vLLM on the device; the host knows upper bounds only."""

    tree: TreeBatch  # [R, N]
    draft: DraftProbs
    first: Tensor  # [R]: row of each root
    root: Tensor  # [R]: its position
    scheduled: np.ndarray  # [R]: nodes, at most; on the host
    order: Tensor | None  # [R, N]: place of each node in generation order; None: its own
    levels: int  # largest depth of a tree
    max_children: int  # of a node

    @classmethod
    def of(cls, drafts: Drafts, batch: Any, *, levels: int, max_children: int) -> "Verification":
        """`batch`: vLLM's InputBatch, its positions still linear.

        Large trees are laid out depth first, children in generation order, which keeps every rule lossless; the
        attention kernel skips blocks without ancestors. Those of a batch with a grammar keep their order: its masks
        come in generation order.
        """
        logits = batch.cu_num_logits.diff().long()
        first = batch.query_start_loc[1 : 1 + batch.num_reqs] - logits
        root = batch.positions[first]
        tree, draft = drafts.of(batch.idx_mapping, root, logits - 1)
        ordered = batch.has_structured_output_reqs or drafts.initial is not None
        large = tree.tokens.shape[1] > IN_GENERATION_ORDER and not ordered
        order = depth_first(tree.parent, tree.valid) if large else None
        if order is not None:
            tree, draft = permuted(tree, order), draft.permuted(order)
        return cls(tree, draft, first, root, batch.num_draft_tokens_per_req, order, levels, max_children)

    @classmethod
    def laid_out(cls, drafts: Drafts, batch: Any, layout: Layout, *, levels: int, max_children: int) -> "Verification":
        """Do `of` and `write_rows` in one launch, for trees in generation order; the result is made of parts of
        `layout`. A batch in which requests with draft tokens are still reading their prompts has no trees, and one
        without draft tokens only roots."""
        count, scheduled = batch.num_reqs, batch.num_draft_tokens_per_req
        scheduled = np.zeros(count, dtype=np.int32) if scheduled is None else scheduled
        parts = (*layout.tree, *layout[1:-1])
        *tree, slot, planned, place, first, root, _ = (part[:count] for part in parts)
        step = cls(
            TreeBatch(*tree),
            drafts.probs(place, slot, planned),
            first,
            root,
            scheduled,
            None,
            levels,
            max_children,
        )
        layout.update(
            drafts.drafted,
            batch.idx_mapping,
            batch.cu_num_logits,
            batch.query_start_loc,
            batch.positions,
            batch.input_ids,
            plain=not step.reads_only_roots(batch),
        )
        return step

    @property
    def chosen(self) -> Tensor | None:
        if self.draft.chosen is None:
            return None
        chosen = self.draft.chosen[self.draft.place.clamp(min=0)]
        return (chosen if self.order is None else chosen.gather(1, self.order))[:, : self.tree.tokens.shape[1]]

    @property
    def initial(self) -> Tensor:
        """See `step.Verification`."""
        if self.draft.initial is None:
            return torch.zeros_like(self.root)
        leading = self.tree.valid.int().cumprod(1).sum(1)  # those that are verified
        return torch.minimum(self.draft.initial[self.draft.place.clamp(min=0)], leading)

    def draft_probs(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """See `step.Verification`."""
        return self.draft.after(node)

    def allowed(self, invalid: Tensor, root: Tensor) -> "Verification":
        """The trees without the nodes whose rows of logits are `invalid` [rows]; nothing below them is accepted. For
        acceptance alone: their rows of the batch stay. `root` [R]: row of each root."""
        tree = self.tree
        rows = root[:, None] + 1 + torch.arange(tree.tokens.shape[1], device=root.device)
        removed = invalid[rows.clamp(max=len(invalid) - 1)] & tree.valid
        return self._replace(tree=tree._replace(tokens=tree.tokens.masked_fill(removed, -1)))

    def write_rows(self, positions: Tensor, input_ids: Tensor) -> None:
        """Write position = root + depth, in place; the slots of the rows stay those of linear positions. Tokens are
        written in the order of the nodes."""
        self._write(positions, self.tree.valid, self.root[:, None] + self.tree.depth)
        if self.order is not None:
            self._write(input_ids, self.tree.valid, self.tree.tokens)

    def write_path(self, batch: Any, accepted: Accepted) -> Tensor:
        """Write the accepted path after the root, with linear positions, into vLLM's InputBatch, for the draft to read.

        Returns:
            [rows] of the batch and its padding: those after each root replaced by the rows of the accepted nodes.
        """
        positions, input_ids = batch.positions[: batch.num_tokens_after_padding], batch.input_ids
        if compiles(positions.device):
            where = self.first, self.root, self.tree.tokens
            return write_accepted(positions, input_ids, *where, accepted.tokens, accepted.nodes)
        after = torch.arange(1, 1 + self.tree.tokens.shape[1], device=positions.device)
        self._write(positions, self.tree.valid, self.root[:, None] + after)
        self._write(input_ids, accepted.nodes >= 0, accepted.tokens)
        rows = torch.arange(len(positions), device=positions.device)
        self._write(rows, accepted.nodes >= 0, self.first[:, None] + 1 + accepted.nodes)
        return rows

    def _write(self, rows: Tensor, where: Tensor, new: Tensor) -> None:
        """Write `new` [R, L] to the rows after each root where `where` [R, L] is true; else rewrite the root's row."""
        after = self.first[:, None] + 1 + torch.arange(new.shape[1], device=rows.device)
        place = torch.where(where, after, self.first[:, None])
        old = rows[self.first][:, None]
        rows[place] = torch.where(where, new.to(rows.dtype), old)

    def reads_only_roots(self, batch: Any) -> bool:
        """Return whether every request with draft tokens has only its root before them; else it is still reading its
        prompt, and its draft tokens are placeholders."""
        num_other_tokens = batch.num_scheduled_tokens - self.scheduled
        return bool((num_other_tokens[self.scheduled > 0] == 1).all())

    @property
    def plain(self) -> "Verification":
        """Same rows without trees: nothing is accepted."""
        return self._replace(tree=self.tree.cut(torch.zeros_like(self.root)))

    def write_mask(self, layout: Layout, row_start: Tensor, count: int, rows: int) -> None:
        """Write what the attention kernel reads of trees in another order than that of their generation.

        Args:
            row_start: [count + 1 or more] int32.
            count: requests, those of padding, which have no rows, left out.
            rows: of these requests, and of padding.
        """
        nodes = int(self.scheduled.max())
        bits = packed_bits(self.tree.parent[:count, :nodes], row_start[: count + 1], rows)
        layout.bits[:rows, : bits.shape[1]] = bits
        layout.context[:count] = self.root[:count]

    def dense(self, native: Any, block_table: Tensor, block_size: int, longest: int) -> DenseTrees:
        """Metadata on a CPU.

        Args:
            native: vLLM's, for rows that the backend reads first; None: none.
            block_table: [R, B], at least of the requests with draft tokens.
            longest: most tokens of a request in the cache, on the host.
        """
        requests = async_tensor_h2d(np.flatnonzero(self.scheduled), device=self.first.device)
        nodes = int(self.scheduled.max())
        valid = self.tree.valid[requests, :nodes]
        inside, mask = pad(valid, (1, 0), value=True), ancestor_mask(self.tree.parent[requests, :nodes])
        where = block_table[requests], self.first[requests], inside, mask, self.root[requests]
        return DenseTrees.of(native, *where, block_size=block_size, longest=longest)

    def commit(self, nodes: Tensor, metadata: dict[str, Any], layers: dict[str, Any], slots: dict[str, Tensor]) -> None:
        """Copy the K/V of the accepted `nodes` [R, L] (-1 pads) to the slots after the root, on a CPU.

        Args:
            metadata: of every layer of the verification.
            layers: vLLM's static forward context.
            slots: layer -> slot of every row of the batch.
        """
        levels = torch.arange(nodes.shape[1], device=nodes.device)
        home, source = self.first[:, None] + 1 + levels, self.first[:, None] + 1 + nodes
        accepted = nodes >= 0
        source = torch.where(accepted, source, self.first[:, None]).flatten()
        for trees in {id(part): part for part in metadata.values() if isinstance(part, DenseTrees)}.values():
            for name, (key, value) in trees.saved.items():
                slot = slots[name]
                target = torch.where(accepted, slot[home.clamp(max=len(slot) - 1)], -1).flatten()
                layer = layers[name]
                rows = source.clamp(max=len(key) - 1)
                layer.impl.write(layer, key[rows], value[rows], target)
