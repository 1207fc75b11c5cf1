"""Drafts with attention layers: their K/V of accepted tokens is in vLLM's paged cache, that of nodes outside it."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.engine.common.attention import DraftKeys, TreeMetadata
from vllm_adaptive_tree.engine.common.contexts import PagedContexts
from vllm_adaptive_tree.engine.common.tree_state import TreeState
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.drafting import Roots, TargetOutput, TreeDrafting
from vllm_adaptive_tree.engine.v2.kernel_dispatch import counter_rng
from vllm_adaptive_tree.engine.v2.level_keys import LevelKeys
from vllm_adaptive_tree.proposers import Request, draft_tree


class Unattended(TreeMetadata):
    """Of levels that attend to nothing."""

    def open_level(self, parent: Tensor) -> None:
        """No key is kept."""

    def attend(
        self, impl: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, out: Tensor
    ) -> Tensor:
        return out.zero_()


class PagedDraft(TreeDrafting, DraftModelSpeculator):
    """Satisfies `drafters.Drafter`; comes before one of vLLM's speculators with a model."""

    hidden_size: int
    first: Rows
    """Of the roots, from the last `read`."""
    level_keys: LevelKeys | None = None
    """On devices with kernels."""

    @abstractmethod
    def read(self, target: TargetOutput, *, without_attention: bool = False) -> None:
        """One forward over the tokens that this step has accepted."""

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor, metadata: Any, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the draft over nodes, `tokens` and `positions` [M], `given` [M, H] by their parents. Returns hidden
        states for the logits, and what the nodes pass on, both [M, H]."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if compiles(self.device):
            layers = self.vllm_config.compilation_config.static_forward_context
            self.level_keys = LevelKeys(
                {name: layers[name] for name in sorted(self.draft_attn_layer_names)},
                [self.width(requests) for requests in range(1, 1 + self.max_num_reqs)],
                self.drafted_levels - 1,
                self.dtype,
                self.device,
            )

    def dummy_run(self, target: TargetOutput, *, without_attention: bool) -> None:
        self.read(target, without_attention=without_attention)
        if without_attention and self.level_keys is not None:
            self.profile_levels()

    def profile_levels(self) -> None:
        """The largest levels of a step, without attention: vLLM's memory profile sees what they allocate."""
        requests = max(range(1, 1 + self.max_num_reqs), key=lambda count: (count * self.width(count), count))
        width, device = self.width(requests), self.device
        hidden = torch.zeros(requests, self.hidden_size, dtype=self.dtype, device=device)
        rows = Rows(self.compute_draft_logits(hidden, 0)[:, None], hidden[:, None])
        place = torch.arange(requests, device=device)
        feedback = None if self.options.draft == "model" else hidden[:, None]
        temperature, levels = torch.ones_like(place, dtype=torch.float32), list[Tensor]()
        self.forwards = 0
        proposal = draft_tree(
            self.pair.proposer,
            self,
            rows,
            TreeState.begin(Unattended(), place, feedback),
            nodes=self.num_speculative_steps,
            request=Request(temperature, place < 0, counter_rng(place, place, purpose=0)),
            agree=lambda frontier, growing: (
                Frontier(*(one[:, :width] for one in frontier)),
                1 + self.forwards < self.drafted_levels,
            ),
            keep=levels.append if self.keeps_levels else lambda _: None,
        )
        self.drafts.store(
            place, place, proposal.padded(self.num_speculative_steps), levels, temperature, rows.logits[:, 0]
        )
        self.drafts.forget()

    @property
    def limit(self) -> int:
        """Tokens that it can read; a request with more of them goes on without drafts."""
        return min(self.draft_model_config.max_model_len, self.max_model_len)

    @property
    def group(self) -> int:
        """Which of vLLM's cache groups holds the draft's layers."""
        groups = self.kv_cache_config.kv_cache_groups
        return next(i for i, one in enumerate(groups) if self.draft_attn_layer_names & set(one.layer_names))

    def sample_draft(self, hidden_states: Tensor, *rest: Any, **_: Any) -> Tensor:
        """vLLM asks for the first token of a chain; its logits are those of the root."""
        logits = self.compute_draft_logits(hidden_states, 0)
        self.first = Rows(logits[:, None], hidden_states[:, None])
        return logits.argmax(-1)

    def begin(
        self, batch: Any, position: Tensor, root: Tensor, feedback: Tensor | None, late: np.ndarray | None = None
    ) -> Roots:
        """After `read`.

        Args:
            position: [R] of the roots as the target counts.
            root, feedback: [R] and [R, 1, H], as in `TreeState`.
            late: [R] bool: which requests still lack tokens that the draft has to read; None: none does.
        """
        grows = position + 1 < self.limit if self.limit < self.max_model_len else None
        if late is not None:
            ready = async_tensor_h2d(~late, device=self.device)
            grows = ready if grows is None else grows & ready
        root = root.clamp(max=self.limit - 1)
        table = self.block_tables.input_block_tables[self.group][: batch.num_reqs]
        if self.level_keys is not None:
            keys: DraftKeys | LevelKeys = self.level_keys.open(table, root, self.width(batch.num_reqs))
        else:
            block_size = self.kv_cache_config.kv_cache_groups[self.group].kv_cache_spec.block_size
            longest = 1 + int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max())
            blocks = -(-min(longest, self.limit) // block_size)
            keys = DraftKeys(PagedContexts(table[:, :blocks], block_size), root + 1)
        return Roots(self.first, position, TreeState.begin(keys, root, feedback), grows)

    def grow(self, tokens: Tensor, parent: Tensor, state: TreeState) -> tuple[Rows, TreeState]:
        """Read one level, `tokens` and `parent` [R, W] as in `Frontier`; unused columns cost their row too."""
        self.forwards += 1
        depth, given = state.below(parent)
        state.keys.open_level(parent)
        positions = (state.root[:, None] + depth).clamp(max=self.limit - 1).flatten()
        given = None if given is None else given.flatten(0, 1)
        metadata = dict.fromkeys(self.draft_attn_layer_names, state.keys)
        hidden, new = self.forward(tokens.clamp(min=0).flatten().int(), positions, metadata, given)
        logits = self.compute_draft_logits(hidden, 0).unflatten(0, tokens.shape)
        feedback = None if state.feedback is None else new.unflatten(0, tokens.shape)
        return Rows(logits, hidden.unflatten(0, tokens.shape)), state.extended(depth, feedback)

    def measure(self, rows: int) -> Callable[[], Any]:
        tokens = torch.zeros(rows, dtype=torch.int32, device=self.device)
        given = torch.zeros(rows, self.hidden_size, dtype=self.dtype, device=self.device)
        return lambda: self.compute_draft_logits(self.forward(tokens, tokens.long(), None, given)[0], 0)
