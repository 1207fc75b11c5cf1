"""Heads of a block (`drafts/block.py`): one forward over it, a root and a mask token for each depth below.

The head's K/V of a position comes from the target's states there, without a forward; they wait until a tree needs them.
The block's own K/V never enters the cache.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.spec_decode.dflash import DFlashProposer

from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.engine.common.attention import DraftKeys
from vllm_adaptive_tree.engine.common.context_norm import norm_each_layer
from vllm_adaptive_tree.engine.drafts.block import BlockHead
from vllm_adaptive_tree.engine.drafts.lattice import Marginals
from vllm_adaptive_tree.engine.drafts.parallel import as_vllm_drafts
from vllm_adaptive_tree.engine.drafts.registry import kind_in
from vllm_adaptive_tree.engine.startup.finish import tree_options
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp
from vllm_adaptive_tree.engine.v1.contexts import KeptContexts
from vllm_adaptive_tree.engine.v1.reads_states import ReadsStates
from vllm_adaptive_tree.engine.v1.shared_embedding import drop_adapters, embedding_of
from vllm_adaptive_tree.engine.v1.unread_states import Unread, states_of, unread_of
from vllm_adaptive_tree.trees import SlicedMask


class BlockDrafter(ReadsStates, DFlashProposer):
    lattice: Marginals
    """Rows of a level, from the state that the forward has left."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None):
        options = tree_options(vllm_config)
        kind = kind_in(options)
        assert options.levels is not None
        assert isinstance(kind, BlockHead)
        # vLLM has the other kinds for Model Runner V2 only; layers, cache and block are those of DFlash.
        super().__init__(as_vllm_drafts(vllm_config, kind.built_as, options.levels), device, runner)
        # Copies of a configuration are checked again, and as they are vLLM refuses candidates on this runner: its own
        # proposer would not call what scores them.
        self.vllm_config.speculative_config.method = kind.scheduled_as
        self.levels, self.vocabulary = options.levels, vllm_config.model_config.get_vocab_size()
        self.kind = kind
        self.contexts = KeptContexts()
        self.places: Tensor | None = None
        self.last = torch.zeros(1, self.draft_model_config.get_hidden_size(), dtype=self.dtype)
        """[R, H]: the combined states at the last positions before the roots of the next block."""

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        drop_adapters(self.model.model)
        norm_each_layer(self.model.model)
        config = self.draft_model_config.hf_config
        self.anchored = self.kind.anchors and config.sample_from_anchor
        """True if the root's row predicts the token after it, and each row the next; else each row predicts its own."""
        self.lattice = self.kind.lattice(self.model, config, self.vocabulary, self._correlated)
        self.embedding = embedding_of(target_model)

    @property
    def layers(self) -> Collection[str]:
        layers: Collection[str] = self._draft_attn_layer_names
        return layers

    def begin_cache(self, blocks: int) -> None:
        self.contexts.begin_cache(blocks, self.block_table.block_size)
        context = self.vllm_config.compilation_config.static_forward_context
        for name in self.layers:
            context[name].impl.written = self._written
        self.begin_waiting(in_any_order=True)

    def catch_up(
        self, items: list[CatchUp], states: Sequence[Tensor] | None, mask: SlicedMask | None
    ) -> tuple[Rows, Any | None]:
        """See `V1Drafter.catch_up`."""
        if not items or states is None:
            return Rows(torch.empty(0)), None
        combined = self._write(items, states)
        rooted = [item for item in items if item.root is not None]
        if not rooted:
            return Rows(torch.empty(0)), None
        ends = itertools.accumulate(len(item.tokens) for item in items)
        self.last = combined[[end - 1 for item, end in zip(items, ends, strict=True) if item.root is not None]]
        tokens = torch.tensor([item.tokens[-1] for item in rooted])
        hidden = self._block([item.row for item in rooted], [item.start + len(item.tokens) for item in rooted], tokens)
        return self.lattice.begin(hidden, tokens)

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        return self.lattice.grow(tokens, parent, state)

    def sample_state(self) -> Any:
        rows = self.levels + self.kind.whole_block
        hidden = torch.zeros(1, rows, self.draft_model_config.get_hidden_size(), dtype=self.dtype)
        return self.lattice.begin(hidden, torch.zeros(1, dtype=torch.int64))[1]

    def read_keys(self, unread: Unread) -> Tensor:
        """See `ReadsStates.read_keys`. Returns the states that the K/V is made of [positions, H]."""
        combined: Tensor = self.model.combine_hidden_states(unread.states)
        self.model.precompute_and_store_context_kv(combined, unread.positions, unread.slots)
        return combined

    def _write(self, items: list[CatchUp], states: Sequence[Tensor]) -> Tensor:
        """Write the K/V of the positions of `items` to the cache and to the contexts that are kept. Returns the states
        that it is made of [positions, H]."""
        spans = [(item.row, item.start, item.start + len(item.tokens)) for item in items]
        row = np.repeat([item.row for item in items], [len(item.tokens) for item in items])
        table = self.block_table
        unread = unread_of(items, states_of(items, states), table.block_table.np, table.block_size)
        names = self.runner.input_batch.req_ids
        self.contexts.follow([*names, *[None] * (1 + int(row.max()) - len(names))])
        self.places = self.contexts.places(row, unread.positions.numpy(), spans)
        combined = self.read_keys(unread)
        self.places = None
        return combined

    def _correlated(self, candidates: Tensor, logits: Tensor, hidden: Tensor, roots: Tensor) -> Tensor:
        """Scores of a LiLiCorr head: `lattice.Scores`."""
        anchor = self.model.model.hidden_norm(self.last)
        there = torch.ones(len(anchor), dtype=torch.bool)
        scores: Tensor = self.model.model.lilicorr(self.embedding(candidates), logits, hidden, anchor, there)
        return scores

    def _written(self, layer: str, key: Tensor, value: Tensor) -> None:
        if self.places is not None:
            self.contexts.write(layer, self.places, key, value)

    def _block(self, rows: list[int], ends: list[int], tokens: Tensor) -> Tensor:
        """Hidden states, as `Marginals.begin` takes them. `tokens` [R]: the roots, of these `rows` of
        the batch, at the positions `ends`."""
        width = self.levels + (not self.anchored)
        blocks, size = self.block_table.block_table, self.block_table.block_size
        root = torch.tensor(ends)
        table = blocks.cpu[rows, : -(-max(ends) // size)]
        keys = DraftKeys(self.contexts.of(rows, ends, table, size), root)
        keys.open_block(width, causal=self.dflash_causal)
        block = torch.full((len(rows), width), self.parallel_drafting_token_id)
        block[:, 0] = tokens
        positions = (root[:, None] + torch.arange(width)).clamp(max=self.draft_model_config.max_model_len - 1)
        metadata = dict.fromkeys(self.layers, keys)
        with set_forward_context(metadata, self.vllm_config, num_tokens=block.numel(), slot_mapping={}):
            hidden: Tensor = self.model(input_ids=block.flatten().int(), positions=positions.flatten())
        unused = 0 if self.kind.whole_block else width - self.levels
        return hidden.unflatten(0, block.shape)[:, unused:]

    @property
    def block_table(self) -> Any:
        """vLLM's BlockTable of the cache group that holds the head's layers."""
        return self.runner.input_batch.block_table[self.kv_cache_gid]
