"""An independent draft model: it catches up on accepted tokens in the paged cache, then reads trees level by level."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.engine.common.attention import DraftKeys
from vllm_adaptive_tree.engine.v1.attention import native_metadata
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp
from vllm_adaptive_tree.engine.v1.clock import PhaseClock
from vllm_adaptive_tree.engine.v1.contexts import KeptContexts, Reading


class DraftState(NamedTuple):
    keys: DraftKeys
    root_position: Tensor  # [R]
    depth: Tensor  # [R, S] of every slot given to the drafter so far


class ModelDrafter(DraftModelProposer):
    """Loading and cache set-up are vLLM's; the forwards are ours. Satisfies `drafters.Drafter`."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None):
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.contexts = KeptContexts()

    def catch_up(self, accepted: list[CatchUp]) -> tuple[Rows, DraftState | None]:
        """Read the tokens accepted since the last step, and the new roots.

        Returns:
            the rows of the roots, in the order of their requests, and the state of their trees (None without roots).
        """
        tokens = [token for item in accepted for token in item.tokens]
        if not tokens:
            return Rows(torch.empty(0)), None
        rows, lengths = [item.row for item in accepted], [len(item.tokens) for item in accepted]
        ends = [item.start + length for item, length in zip(accepted, lengths, strict=True)]
        table = self.block_table
        blocks, size = table.block_table, table.block_size
        position = np.concatenate([np.arange(item.start, end) for item, end in zip(accepted, ends, strict=True)])
        row = np.repeat(rows, lengths)
        slots = blocks.np[row, position // size].astype(np.int64) * size + position % size
        builder, slot_mapping = self.draft_attn_groups[0].get_metadata_builder(0), torch.from_numpy(slots)
        metadata = native_metadata(builder, lengths, ends, blocks.cpu[rows], slot_mapping)
        names = self.runner.input_batch.req_ids
        self.contexts.follow([*names, *[None] * (1 + max(rows) - len(names))])  # at start-up no request has a row
        spans = [(item.row, item.start, end) for item, end in zip(accepted, ends, strict=True)]
        places = self.contexts.places(row, position, spans)
        if places is not None:
            metadata = Reading(metadata, self.contexts, places)
        hidden = self._forward(torch.tensor(tokens), torch.from_numpy(position), slot_mapping, metadata)
        rooted = [index for index, item in enumerate(accepted) if item.has_root]
        if not rooted:
            return Rows(torch.empty(0)), None
        last = np.cumsum(lengths)[rooted] - 1
        roots_of, length = [rows[index] for index in rooted], [ends[index] for index in rooted]
        table = blocks.cpu[roots_of, : -(-max(length) // size)]
        context = torch.tensor(length)
        keys = DraftKeys(self.contexts.of(roots_of, length, table), context)
        state = DraftState(keys, context - 1, torch.zeros(len(rooted), 1, dtype=torch.int64))
        roots = hidden[torch.from_numpy(last)][:, None]
        return Rows(self.model.compute_logits(roots), roots), state

    def grow(self, tokens: Tensor, parent: Tensor, state: DraftState) -> tuple[Rows, DraftState]:
        """Read one level, `tokens` and `parent` [R, W] as in `Frontier`; only real nodes cost a row."""
        depth = state.depth.gather(1, parent) + 1
        places = (tokens >= 0).flatten().nonzero().flatten()
        state.keys.open_level(parent, places)
        positions = (state.root_position[:, None] + depth).flatten()[places]
        hidden = self._forward(tokens.flatten()[places], positions, None, state.keys)
        logits = self.model.compute_logits(hidden)  # [M, V]
        rows = Rows(state.keys.pad(logits), state.keys.pad(hidden))
        return rows, state._replace(depth=torch.cat([state.depth, depth], 1))

    def _forward(self, tokens: Tensor, positions: Tensor, slots: Tensor | None, metadata: Any) -> Tensor:
        """Hidden states [tokens, hidden]; without `slots` nothing is written to the cache."""
        layers = self._draft_attn_layer_names
        with set_forward_context(
            dict.fromkeys(layers, metadata),
            self.vllm_config,
            num_tokens=len(tokens),
            slot_mapping={} if slots is None else dict.fromkeys(layers, slots),
        ):
            # A node may be beyond the draft's last position, which costs quality only.
            positions = positions.clamp(max=self.draft_model_config.max_model_len - 1)
            hidden: Tensor = self.model(input_ids=tokens.int(), positions=positions)
        return hidden

    @property
    def block_table(self) -> Any:
        """vLLM's BlockTable of the cache group that holds the draft's layers."""
        return self.runner.input_batch.block_table[self.kv_cache_gid]


class TimedDrafter:
    """The drafter, with its forwards counted as "draft" and subtracted from the surrounding "tree"."""

    def __init__(self, drafter: ModelDrafter, clock: PhaseClock, hidden: list[Any]):
        self.drafter, self.clock, self.hidden = drafter, clock, hidden
        self.levels: list[float] = []  # seconds

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        before = self.clock.seconds["draft"]
        with self.clock.phase("draft"):
            result = self.drafter.grow(tokens, parent, state)
        self.levels.append(self.clock.seconds["draft"] - before)
        self.clock.seconds["tree"] -= self.levels[-1]
        if self.hidden:  # a recorder has put the root's there
            self.hidden.append(result[0].hidden)
        return result
