"""Drafts with K/V in the paged cache: a model or a head that catches up there, then reads trees level by level."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.engine.common.attention import DraftKeys
from vllm_adaptive_tree.engine.common.tree_state import TreeState
from vllm_adaptive_tree.engine.v1.attention import native_metadata
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp
from vllm_adaptive_tree.engine.v1.contexts import CatchUpMetadata, KeptContexts
from vllm_adaptive_tree.trees import SlicedMask


class PagedDrafter(SpecDecodeBaseProposer):
    """Mixin before one of vLLM's proposers among the bases of a class. Loading and cache set-up are vLLM's; the
    forwards are ours."""

    def begin_drafting(self, runner: Any) -> None:
        self.runner, self.contexts = runner, KeptContexts()
        self.num_speculative_tokens = 1  # forwards of vLLM's warm-up; ours are measured by themselves

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        self.supports_mm_inputs = False  # compiled for tokens: it reads that of an image in its place

    @property
    def layers(self) -> Collection[str]:
        layers: Collection[str] = self._draft_attn_layer_names
        return layers

    def begin_cache(self, blocks: int) -> None:
        self.contexts.begin_cache(blocks, self.block_table.block_size)

    def forget(self, requests: Collection[str]) -> None:
        self.contexts.forget(requests)

    @abstractmethod
    def inputs(self, items: list[CatchUp], states: Sequence[Tensor] | None) -> Tensor | None:
        """Hidden states that the forward of `catch_up` reads beside the tokens, [tokens, H]; None: none."""

    def catch_up(
        self, items: list[CatchUp], states: Sequence[Tensor] | None, mask: SlicedMask | None
    ) -> tuple[Rows, Any | None]:
        """See `V1Drafter.catch_up`."""
        tokens = [token for item in items for token in item.tokens]
        if not tokens:
            return Rows(torch.empty(0)), None
        rows, lengths = [item.row for item in items], [len(item.tokens) for item in items]
        ends = [item.start + length for item, length in zip(items, lengths, strict=True)]
        table = self.block_table
        blocks, size = table.block_table, table.block_size
        position = np.concatenate([np.arange(item.start, end) for item, end in zip(items, ends, strict=True)])
        row = np.repeat(rows, lengths)
        slots = blocks.np[row, position // size].astype(np.int64) * size + position % size
        builder, slot_mapping = self.draft_attn_groups[0].get_metadata_builder(0), torch.from_numpy(slots)
        metadata = native_metadata(builder, lengths, ends, blocks.cpu[rows], slot_mapping)
        names = self.runner.input_batch.req_ids
        self.contexts.follow([*names, *[None] * (1 + max(rows) - len(names))])  # at start-up no request has a row
        spans = [(item.row, item.start, end) for item, end in zip(items, ends, strict=True)]
        places = self.contexts.places(row, position, spans)
        if places is not None:
            metadata = CatchUpMetadata(metadata, self.contexts, places)
        hidden, feedback = self._forward(
            torch.tensor(tokens), torch.from_numpy(position), slot_mapping, metadata, self.inputs(items, states)
        )
        rooted = [index for index, item in enumerate(items) if item.root is not None]
        if not rooted:
            return Rows(torch.empty(0)), None
        last = torch.from_numpy(np.cumsum(lengths)[rooted] - 1)
        roots_of, length = [rows[index] for index in rooted], [ends[index] for index in rooted]
        table = blocks.cpu[roots_of, : -(-max(length) // size)]
        context = torch.tensor(length)
        keys = DraftKeys(self.contexts.of(roots_of, length, table, size), context)
        keys.sliced = mask
        state = TreeState.begin(keys, context - 1, None if feedback is None else feedback[last][:, None])
        roots = hidden[last]
        return Rows(self.model.compute_logits(roots)[:, None], roots[:, None]), state

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        """Read one level, `tokens` and `parent` [R, W] as in `Frontier`; only real nodes cost a row."""
        depth, given = state.below(parent)
        places = (tokens >= 0).flatten().nonzero().flatten()
        state.keys.open_level(parent, places)
        positions = (state.root[:, None] + depth).flatten()[places]
        inputs = None if given is None else given.flatten(0, 1)[places]
        hidden, feedback = self._forward(tokens.flatten()[places], positions, None, state.keys, inputs)
        logits = self.model.compute_logits(hidden)  # [M, V]
        rows = Rows(state.keys.pad(logits), state.keys.pad(hidden))
        return rows, state.extended(depth, None if feedback is None else state.keys.pad(feedback))

    def sample_state(self) -> Any:
        return self.catch_up([CatchUp(row=0, start=0, tokens=[0], root=0)], None, None)[1]

    def _forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor | None, metadata: Any, inputs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [tokens, H] for logits, and those that a head feeds back; without `slots` nothing is written to
        the cache."""
        layers = self._draft_attn_layer_names
        with set_forward_context(
            dict.fromkeys(layers, metadata),
            self.vllm_config,
            num_tokens=len(tokens),
            slot_mapping={} if slots is None else dict.fromkeys(layers, slots),
        ):
            # A node may be beyond the draft's last position, which costs quality only.
            positions = positions.clamp(max=self.draft_model_config.max_model_len - 1)
            if self.uses_mrope:  # a compiled module has been traced with vLLM's buffer of several numbers a token
                self._set_positions(len(tokens), positions)
                positions = self._get_positions(len(tokens))
            states = {} if inputs is None else {"hidden_states": inputs}
            hidden: Any = self.model(input_ids=tokens.int(), positions=positions, **states)
        if inputs is None:
            return hidden, None
        return hidden if isinstance(hidden, tuple) else (hidden, hidden)

    @property
    def block_table(self) -> Any:
        """vLLM's BlockTable of the cache group that holds the draft's layers."""
        return self.runner.input_batch.block_table[self.kv_cache_gid]
