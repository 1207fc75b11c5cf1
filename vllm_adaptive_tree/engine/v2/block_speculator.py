"""Heads of a block (`drafts/block.py`) on Model Runner V2: vLLM's forward over it, and trees from that."""

import copy
import weakref
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.engine.common.context_norm import norm_each_layer
from vllm_adaptive_tree.engine.common.node_quota import MOST_TREES
from vllm_adaptive_tree.engine.drafts.block import BlockHead
from vllm_adaptive_tree.engine.drafts.parallel import as_vllm_drafts
from vllm_adaptive_tree.engine.drafts.registry import kind_in
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.drafting import TargetOutput, TreeDrafting
from vllm_adaptive_tree.engine.v2.graphs import ladder
from vllm_adaptive_tree.engine.v2.reads_states import ReadsStates
from vllm_adaptive_tree.engine.v2.unread_states import Late
from vllm_adaptive_tree.registry import imported


class BlockForward(DFlashSpeculator):
    """Block forward that samples nothing: its hidden states stay in a persistent buffer."""

    vllm_config: Any
    resting = False
    """True if only the head's K/V is written."""

    def __init__(self, vllm_config: Any, device: torch.device, rows: int, *, whole_block: bool):
        """`rows`: most of a request in a step without prompts; `whole_block`: as a `BlockHead` says."""
        self.rows, self.whole_block = rows, whole_block
        super().__init__(vllm_config, device)
        self.rows_kept = self.num_query_per_req if self.whole_block else self.num_speculative_steps
        shape = min(self.max_num_reqs, MOST_TREES), self.rows_kept, self.draft_model_config.get_hidden_size()
        self.predicting = torch.zeros(shape, dtype=self.dtype, device=device)
        """Hidden states of the last forward, by request, then depth."""

    def _generate_draft(self, num_reqs: int, *rest: Any, **options: Any) -> None:
        if self.resting:
            return
        kept, hidden = self.predicting[:num_reqs], self._run_model(*rest, **options)
        count = len(kept) * self.rows_kept  # a batch of more requests than have trees keeps nothing of the others
        kept.copy_((hidden[:count] if self.whole_block else hidden[self.sample_indices[:count]]).view(kept.shape))

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Create vLLM's manager for the numbers of requests that the trees' graphs have: by the sizes of the target's
        rows the fullest batch may have none. A block is whole, whatever a request's quota of nodes."""
        given, most = self.vllm_config, min(self.max_num_reqs, MOST_TREES)
        self.vllm_config = copy.copy(given)
        speculative = self.vllm_config.speculative_config = copy.copy(given.speculative_config)
        speculative.num_speculative_tokens_per_batch_size = None
        compilation = self.vllm_config.compilation_config = copy.copy(given.compilation_config)
        compilation.cudagraph_capture_sizes = [self.num_query_per_req * requests for requests in ladder(most)]
        compilation.max_cudagraph_capture_size = compilation.cudagraph_capture_sizes[-1]
        super().init_cudagraph_manager(cudagraph_mode)
        self.vllm_config = given

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        """Rows whose K/V a whole graph writes, of vLLM's chain or of a tree."""
        return min(num_reqs * self.rows, self.max_num_tokens)

    @property
    def tokens(self) -> Tensor:
        """Roots of the last forward, [most requests]."""
        return self.input_buffers.input_ids[:: self.num_query_per_req][: self.max_num_reqs]


class MarkovBlock(BlockForward, DSparkSpeculator):
    pass


class PairBlock(BlockForward, DFlash2Speculator):
    pass


class CorrelatedBlock(BlockForward, LiLiCorrSpeculator):
    pass


class BlockSpeculator(ReadsStates, TreeDrafting, DraftModelSpeculator):
    """Speculator whose K/V is made of the target's states. The rows of a block write K/V to the slots after the root,
    where the next step writes that of accepted tokens."""

    draft_logits = None
    draft_token_confidence_probs = None
    enable_adaptive_verification = False
    supports_mm_inputs = False
    hidden_size = None

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any, req_states: Any):
        kind, levels = kind_in(runner.options), runner.options.levels
        assert isinstance(kind, BlockHead)
        self.kind, forward = kind, imported(kind.forward)
        rows = 1 + runner.options.num_speculative_tokens
        self.block: BlockForward = forward(
            as_vllm_drafts(vllm_config, kind.method, levels), device, rows, whole_block=kind.whole_block
        )
        TreeDrafting.__init__(self, runner, req_states)
        self.vocabulary = vllm_config.model_config.get_vocab_size()
        self.limit = min(self.block.draft_model_config.max_model_len, self.block.max_model_len)

    def __getattr__(self, name: str) -> Any:
        """Attribute of the block, for vLLM's runner, which expects a speculator with a model."""
        if name == "block":
            raise AttributeError(name)
        return getattr(self.block, name)

    @property
    def draft_attn_layer_names(self) -> Any:
        return self.block.draft_attn_layer_names

    @cached_property
    def may_wait(self) -> bool:
        """A block that a window has left may be another request's when what has waited is read."""
        layers = self.vllm_config.compilation_config.static_forward_context
        windows = [layers[name].sliding_window for name in self.draft_attn_layer_names]
        return super().may_wait and windows == [None] * len(windows)

    @property
    def num_query_per_req(self) -> int:
        return self.block.num_query_per_req

    def load_model(self, target_model: nn.Module) -> None:
        self.block.load_model(target_model)
        norm_each_layer(self.block.model.model)
        self.lattice = self.kind.lattice(
            self.block.model,
            self.block.draft_model_config.hf_config,
            self.vocabulary,
            lambda candidates, logits, hidden, roots: self.block._score_candidates(candidates, logits, hidden),
        )

    def load_draft_model(self, *args: Any) -> nn.Module:
        return self.block.load_draft_model(*args)

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        self.block.set_attn(*args, **kwargs)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        self.block.init_cudagraph_manager(cudagraph_mode if compiles(self.device) else CUDAGraphMode.NONE)
        # vLLM's profile frees the managers that are a speculator's own attributes, so this holds the only reference.
        self.block_graphs: Any = self.block.query_cudagraph_manager
        self.block.query_cudagraph_manager = weakref.proxy(self.block_graphs)

    def capture(self) -> None:
        """Record vLLM's graphs of the block, the K/V of its context with it, and those of the trees."""
        if self.block_graphs.needs_capture() and not self.off:
            self.block.capture()
        super().capture()

    def release_graphs(self) -> None:
        super().release_graphs()
        self.block_graphs.release_graphs()

    def observe_verification(self, *args: Any, **kwargs: Any) -> None:
        """Ignore vLLM's estimate of acceptance, which only adaptive verification reads."""

    def read(self, target: TargetOutput) -> None:
        batch, auxiliary = target.batch, target.auxiliary
        if self.accepted is not None:
            step, path = self.accepted
            rows = step.write_path(batch, path)
            auxiliary = [torch.cat(auxiliary, -1)[rows]] if auxiliary else None
        # The graphs hold the block too. vLLM 0.33 leaves the block out by itself if no drafts are asked for.
        rests = {"is_profile": True, "num_speculative_tokens": 0} if self.block.resting else {}
        self._propose(target, auxiliary, **rests)

    def read_at_rest(self, target: TargetOutput) -> None:
        self.block.resting = True
        self.read(target)
        self.block.resting = False

    def read_late(self, late: Late) -> None:
        block, rows, tables = self.block, len(late.place), self.block_tables
        slots = tables.compute_slot_mappings(late.request, late.row_start, late.place, rows, out=self.late_slots)
        block.hidden_states[:rows] = block.model.combine_hidden_states(late.states)
        block.context_positions[:rows] = late.place
        for i, group in enumerate(block.draft_kv_cache_group_ids):
            block._context_slot_mappings[i, :rows] = slots[group]
        block._precompute_context_kv(0, rows)

    def dummy_run(self, target: TargetOutput, *, without_attention: bool) -> None:
        """While vLLM measures memory the lattice of the largest batch is there too. A dummy batch may have more
        requests than ever run at once."""
        if self.may_rest and self.may_wait:
            self.waiting_room(target)
        most = self.block.max_num_tokens // self.num_query_per_req
        batch = copy.copy(target.batch)
        batch.num_reqs = min(batch.num_reqs, most)
        shown = target._replace(batch=batch)
        self._propose(shown, target.auxiliary, dummy_run=True, skip_attn_for_dummy_run=without_attention)
        if without_attention:
            self.roots(min(most, self.most_trees))

    def _propose(self, target: TargetOutput, auxiliary: list[Tensor] | None, **options: Any) -> None:
        batch = target.batch
        if self.selected:  # the host knows the sum of all rows alone, and vLLM sizes a kernel by the longest
            batch = copy.copy(batch)
            batch.num_scheduled_tokens = np.maximum(batch.num_scheduled_tokens, 1 + self.num_speculative_steps)
        self.block.propose(
            batch,
            target.metadata,
            target.slots,
            target.hidden,
            auxiliary,
            target.num_sampled,
            target.num_rejected,
            target.last_sampled,
            target.next_prompt_tokens,
            self.block.temperature,
            self.block.seeds,
            **options,
        )

    def roots(self, requests: int) -> tuple[Rows, Any]:
        return self.lattice.begin(self.block.predicting[:requests], self.block.tokens[:requests].long())

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        self.forwards += 1
        return self.lattice.grow(tokens, parent, state)
