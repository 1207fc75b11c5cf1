"""Drafts with attention layers: K/V of accepted tokens is in vLLM's paged cache, that of nodes outside it."""

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_adaptive_tree.attention.plan import AttentionPlan
from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.engine.common.attention import DraftKeys, TreeMetadata
from vllm_adaptive_tree.engine.common.contexts import PagedContexts
from vllm_adaptive_tree.engine.common.tree_state import TreeState
from vllm_adaptive_tree.engine.targets.latents import is_latent
from vllm_adaptive_tree.engine.v2.attention import KernelTrees
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.drafting import TargetOutput, TreeDrafting
from vllm_adaptive_tree.engine.v2.graphs import Piece
from vllm_adaptive_tree.engine.v2.latent_batch import Chains
from vllm_adaptive_tree.engine.v2.level_keys import LevelKeys
from vllm_adaptive_tree.engine.v2.target_buffers import plans
from vllm_adaptive_tree.kernels.reading import Cache


def only_roots(batch: Any) -> bool:
    """Return whether the requests of vLLM's InputBatch have one token and a tree each, and none reads its prompt."""
    drafts = batch.num_draft_tokens_per_req
    num_other_tokens = batch.num_scheduled_tokens - (0 if drafts is None else drafts)
    return not batch.has_prefill and bool((num_other_tokens == 1).all())


class PagedDraft(TreeDrafting, DraftModelSpeculator):
    """Mixin that satisfies `drafters.Drafter`, before one of vLLM's speculators with a model.

    Accepted tokens after a prompt are read in a piece with a fixed number of rows for each request, those beyond the
    path unused; prompts, and batches that are too large for that, by vLLM's own first forward.
    """

    hidden_size: int
    root_hidden: Tensor | None = None
    """Hidden states [requests, H] of the last `read`, from which the roots' logits are computed."""
    level_keys: LevelKeys | None = None
    """Side buffers for K/V of nodes, on devices with kernels."""
    profiling = False
    """True while vLLM measures memory: there is no cache."""
    chain_plan: AttentionPlan | None = None
    late_plan: AttentionPlan | None = None
    """Plans of `Chains` of a step's tokens and of earlier ones, on devices with kernels."""
    longest_text = 0
    """Most tokens of a request in the cache; on the host."""

    @abstractmethod
    def read_natively(self, target: TargetOutput, *, without_attention: bool = False) -> None:
        """Run vLLM's forward over the tokens that this step has accepted; it ends with `sample_draft`."""

    @abstractmethod
    def forward(
        self, tokens: Tensor, positions: Tensor, metadata: Any, hidden_inputs: Tensor | None, slots: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run the draft over rows: `tokens` and `positions` [M]; `hidden_inputs` [M, H]: a head's states of what
        precedes them; `slots` [M] of the cache by layer, for K/V that stays. Returns hidden states for the logits, and
        the states that the rows pass on, both [M, H]."""

    def hidden_inputs(self, rows: int) -> Tensor | None:
        """Hidden states that a head is given with the first rows of `inputs` [rows, H]."""
        return None

    def feedback(self, requests: int) -> Tensor | None:
        """Hidden states [R, H] that the roots pass to their children."""
        return None

    def stage_hidden_states(self, target: TargetOutput, rows: int) -> None:
        """Copy the target's states that `hidden_inputs` needs into a buffer."""

    @property
    def reading_width(self) -> int:  # type: ignore[override]
        return self.levels + 2 - self.shift if compiles(self.device) else 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.supports_mm_inputs = False  # compiled for tokens: it reads that of an image in its place
        if compiles(self.device):
            context = self.vllm_config.compilation_config.static_forward_context
            layers = {name: context[name] for name in sorted(self.draft_attn_layer_names)}
            widths = [self.width(requests) for requests in range(1, 1 + self.most_trees)]
            self.level_keys = LevelKeys(layers, widths, self.drafted_levels - 1, self.dtype, self.device)
            sizes = self.most_trees * self.reading_width, self.most_trees, self.reading_width
            self.reading_plans = plans(layers, *sizes, self.dtype, self.device)
            if self.latent:
                rows = self.max_num_tokens, self.max_num_reqs, self.reading_width
                made = (next(iter(plans(layers, *rows, self.dtype, self.device).values())) for _ in range(2))
                self.chain_plan, self.late_plan = made

    def pieces(self) -> dict[Piece, Callable[[], Any]]:
        sizes = [size for size in reversed(self.sizes) if self.fits(size)]
        reading = {Piece.of(size): partial(self.read_accepted, size) for size in sizes}
        return reading | super().pieces()

    def fits(self, requests: int) -> bool:
        """Return whether a forward may have as many rows as a piece that reads."""
        return requests * self.reading_width <= self.most_rows

    def dummy_run(self, target: TargetOutput, *, without_attention: bool) -> None:
        self.read_natively(target, without_attention=without_attention)
        if without_attention and self.level_keys is not None:
            self.stage_hidden_states(target, 0)
            self.profile_levels()

    def profile_levels(self) -> None:
        """Run the largest levels of a step, without attention, so that vLLM's memory profile sees their allocations."""
        requests = max(self.sizes, key=lambda count: (count * self.width(count), count))
        self.inputs.alive.fill_(1)
        self.inputs.temperature.fill_(1)
        self.profiling = True
        self.trees(requests, self.drafted_levels)
        self.profiling = False
        self.inputs.clear()
        self.drafts.forget()

    @cached_property
    def latent(self) -> bool:
        """True if its layers are of multi-head latent attention."""
        context = self.vllm_config.compilation_config.static_forward_context
        return any(is_latent(context[name]) for name in self.draft_attn_layer_names)

    @property
    def limit(self) -> int:  # type: ignore[override]
        return min(self.draft_model_config.max_model_len, self.max_model_len)

    @property
    def group(self) -> int:
        """Index of vLLM's cache group that holds the draft's layers."""
        groups = self.kv_cache_config.kv_cache_groups
        return next(i for i, group in enumerate(groups) if self.draft_attn_layer_names & set(group.layer_names))

    @property
    def block_size(self) -> int:
        size: int = self.kv_cache_config.kv_cache_groups[self.group].kv_cache_spec.block_size
        return size

    def table(self, requests: int) -> Tensor:
        """Block table [R, B] of the first requests of the batch, in a persistent buffer."""
        table: Tensor = self.block_tables.input_block_tables[self.group][:requests]
        return table

    def cache(self, requests: int) -> Cache | None:
        return Cache(self.table(requests), self.block_size) if self.level_keys is not None else None

    def read(self, target: TargetOutput) -> None:
        batch, requests = target.batch, self.at_once(target.batch)
        if not requests:
            self.longest_text = int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max())
            self.read_natively(target)
            return
        self.stage_hidden_states(target, requests * self.reading_width)
        self.graphs.run(Piece.of(requests), partial(self.read_accepted, requests))

    def at_once(self, batch: Any) -> int:
        """Requests of the piece that reads this batch, padding included; 0: it is read as vLLM does."""
        if self.level_keys is None or batch.num_reqs > self.most_trees:
            return 0
        requests = self.padded(batch.num_reqs)
        return requests if self.fits(requests) and only_roots(batch) else 0

    def metadata_of(
        self,
        request: Tensor,
        row_start: Tensor,
        end: Tensor,
        place: Tensor,
        sizes: np.ndarray,
        longest: np.ndarray,
        slots: Tensor,
        unstored: Tensor | None = None,
    ) -> tuple[Any, dict[str, Tensor]]:
        """vLLM's metadata of a forward over earlier tokens of K requests, and its slots by layer. The tables of the
        batch have to be gathered again after it.

        Args:
            request: [K], vLLM's index.
            row_start, end: [K + 1] and [K], of the rows, and tokens up to the last row of each request.
            place: [rows], positions.
            sizes, longest: [K], rows and tokens of each request, at most; on the host.
            slots: buffer for slots.
            unstored: [rows] bool, rows whose K/V is not stored.
        """
        buffers, tables, count, total = self.input_buffers, self.block_tables, len(sizes), len(place)
        for buffer, numbers, rest in ((buffers.query_start_loc, row_start, total), (buffers.seq_lens, end, 0)):
            buffer.fill_(rest)
            buffer[: len(numbers)] = numbers
        tables.gather_block_tables(request, count)
        slots = tables.compute_slot_mappings(request, buffers.query_start_loc[: 1 + count], place, total, out=slots)
        if unstored is not None:
            slots = slots.masked_fill(unstored, PAD_SLOT_ID)
        by_layer = build_slot_mappings_by_layer(slots, self.kv_cache_config)
        if self.latent:
            starts, lengths = buffers.query_start_loc[: 1 + count], buffers.seq_lens[:count]
            bounds = int(sizes.max()), int(longest.max())
            late = Chains(starts, lengths - starts.diff(), self.table(count), total, *bounds)
            read = late.metadata(None, self.block_size, self.late_plan)
            return dict.fromkeys(self.draft_attn_layer_names, read), by_layer
        metadata = super()._build_attn_metadata(
            num_reqs=count,
            batch_desc=BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=total, num_reqs=count),
            query_start_loc_np=np.concatenate([[0], sizes.cumsum()]).astype(np.int32),
            seq_lens_cpu_upper_bound=torch.from_numpy(longest.astype(np.int32)),
            step=0,
            slot_mappings=slots,
        )
        return metadata, by_layer

    def chains(self, batch: Any, context: Tensor, others: Any, block_table: Tensor, rows: int) -> TreeMetadata:
        """Metadata with which layers of latents read the accepted tokens of a verification.

        Args:
            batch: vLLM's InputBatch.
            context: [Q], tokens before each root.
            others: vLLM's metadata of requests without trees.
            block_table: [Q, B] of those that have, the first; as many `rows` they have, with padding.
        """
        start = batch.query_start_loc[: 1 + len(block_table)]
        longest = int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max())
        read = Chains(start, context, block_table, rows, 1 + self.num_speculative_steps, longest)
        return read.metadata(others, self.block_size, self.chain_plan)

    def read_accepted(self, requests: int) -> None:
        """Run one forward over the rows of `inputs`, of so many requests, padding included; a piece."""
        inputs, rows = self.inputs, requests * self.reading_width
        row_start, context = inputs.row_start[: requests + 1], inputs.context[:requests]
        for plan in {id(plan): plan for plan in self.reading_plans.values()}.values():
            plan.update(row_start, context)
        table = self.table(requests)
        metadata = {
            name: KernelTrees(None, table, row_start, context, inputs.bits, rows, self.reading_plans[name])
            for name in self.draft_attn_layer_names
        }
        slots = dict.fromkeys(self.draft_attn_layer_names, inputs.slots[:rows])
        hidden, passed = self.forward(
            inputs.tokens[:rows], inputs.positions[:rows], metadata, self.hidden_inputs(rows), slots
        )
        last = inputs.last[:requests]
        self._keep_roots(hidden[last])
        feedback = self.feedback(requests)
        if feedback is not None:
            feedback.copy_(passed[last])

    def sample_draft(self, hidden_states: Tensor, *rest: Any, **_: Any) -> Tensor:
        """First token of a chain after the roots' hidden states, which vLLM asks for."""
        self._keep_roots(hidden_states)
        return self.draft_tokens[: len(hidden_states), 0]

    def _keep_roots(self, hidden: Tensor) -> None:
        if self.root_hidden is None:
            self.root_hidden = hidden.new_zeros(self.most_trees, hidden.shape[1])
        kept = self.root_hidden[: len(hidden)]
        kept.copy_(hidden[: len(kept)])

    def roots(self, requests: int) -> tuple[Rows, TreeState]:
        assert self.root_hidden is not None
        hidden, root = self.root_hidden[:requests], self.inputs.position[:requests] - self.shift
        rows = Rows(self.compute_draft_logits(hidden, 0)[:, None], hidden[:, None])
        root = root.clamp(min=-1, max=self.limit - 1)  # -1: without a token
        if self.level_keys is not None:
            table = None if self.profiling else self.table(requests)
            keys: DraftKeys | LevelKeys = self.level_keys.open(table, root, self.width(requests))
        else:
            blocks = -(-min(1 + self.longest_text, self.limit) // self.block_size)
            keys = DraftKeys(PagedContexts(self.table(requests)[:, :blocks], self.block_size), root + 1)
        feedback = self.feedback(requests)
        return rows, TreeState.begin(keys, root, None if feedback is None else feedback[:, None])

    def grow(self, tokens: Tensor, parent: Tensor, state: TreeState) -> tuple[Rows, TreeState]:
        """Read one level, `tokens` and `parent` [R, W] as in `Frontier`; unused columns cost their row too."""
        self.forwards += 1
        depth, hidden_inputs = state.below(parent)
        state.keys.open_level(parent)
        positions = (state.root[:, None] + depth).clamp(max=self.limit - 1).flatten()
        hidden_inputs = None if hidden_inputs is None else hidden_inputs.flatten(0, 1)
        metadata = dict.fromkeys(self.draft_attn_layer_names, state.keys)
        hidden, new = self.forward(tokens.clamp(min=0).flatten().int(), positions, metadata, hidden_inputs, {})
        logits = self.compute_draft_logits(hidden, 0).unflatten(0, tokens.shape)
        feedback = None if state.feedback is None else new.unflatten(0, tokens.shape)
        return Rows(logits, hidden.unflatten(0, tokens.shape)), state.extended(depth, feedback)
