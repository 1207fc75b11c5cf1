"""vLLM's Model Runner V2 with trees: the hooks, in the order of a step."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import model_runner

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.budget import Budget, DraftTemperature, Planner
from vllm_adaptive_tree.engine import checks
from vllm_adaptive_tree.engine.common.attention import CPUTreeAttention, Law
from vllm_adaptive_tree.engine.common.cost_profile import CostProfile
from vllm_adaptive_tree.engine.common.coverage import Coverage
from vllm_adaptive_tree.engine.common.request_flags import RequestFlags
from vllm_adaptive_tree.engine.common.startup import check_ranks, draft_memory, tree_options
from vllm_adaptive_tree.engine.common.steering import Steering
from vllm_adaptive_tree.engine.common.step_record import step_record
from vllm_adaptive_tree.engine.one_forward import CLASSES
from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.v2 import verification
from vllm_adaptive_tree.engine.v2.adapters import Adapters
from vllm_adaptive_tree.engine.v2.attention import DenseTrees, KernelTrees, PagedTreeAttention
from vllm_adaptive_tree.engine.v2.block_speculator import BlockSpeculator
from vllm_adaptive_tree.engine.v2.budget import SETTLED, DeviceBudget
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.draft_backlog import DraftBacklog
from vllm_adaptive_tree.engine.v2.draft_tokens import DraftTreesHandler
from vllm_adaptive_tree.engine.v2.drafting import TreeDrafting
from vllm_adaptive_tree.engine.v2.head_speculator import HeadSpeculator
from vllm_adaptive_tree.engine.v2.node_selection import NodeSelection, NoNodes
from vllm_adaptive_tree.engine.v2.rank_agreement import RankAgreement
from vllm_adaptive_tree.engine.v2.sampler import TreeSampler
from vllm_adaptive_tree.engine.v2.speculator import ModelSpeculator
from vllm_adaptive_tree.engine.v2.step_stats import StepStats
from vllm_adaptive_tree.engine.v2.target_buffers import TargetBuffers
from vllm_adaptive_tree.engine.v2.text_speculator import TextSpeculator
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.methods import resolve

if current_platform.is_cpu():
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner as ModelRunner
else:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as ModelRunner


SPECULATORS: dict[str, Any] = {
    "model": ModelSpeculator,
    "eagle": HeadSpeculator,
    "eagle3": HeadSpeculator,
    "mtp": HeadSpeculator,
    **dict.fromkeys(CLASSES, BlockSpeculator),
}
"""By the kind of the draft; any other is without a checkpoint."""
IN_FLIGHT = 2
"""At most so many steps, of which the scheduler does not know yet how many nodes were accepted."""


class TreeModelRunnerV2(ModelRunner):
    def __init__(self, vllm_config: Any, device: torch.device):
        check_ranks(vllm_config)
        self.options = tree_options(vllm_config)
        self.pair = resolve(self.options)
        self.steering = Steering(self.pair.proposer, self.options.tree.steered)
        most = self.options.tree.budget
        fixed = Budget(sampled=False, most=most if isinstance(most, int) else None)
        self.budget = None if most is None else DeviceBudget(fixed, self.steering, learns=False)
        self.cuts_sampled = False  # the number of nodes is chosen before the trees are sampled: any choice is lossless
        self.adaptive_verification: NodeSelection | None
        self.profile: CostProfile | None = None
        self.backlog: DraftBacklog | None = None
        self.step: Verification | None = None
        self.metadata: dict[str, Any] = {}
        self.slots: dict[str, Tensor] = {}
        self.buffers: TargetBuffers | None = None  # where kernels run
        self.stats, self.agreement = StepStats(device), RankAgreement()
        self.record = step_record(vllm_config, self.options)
        self.flags = RequestFlags(vllm_config.scheduler_config.max_num_seqs, self.pair, self.options)
        with swapped(model_runner, "init_speculator", self._speculator):
            super().__init__(vllm_config, device)
        self.lora_state = Adapters(self.max_num_reqs)
        self.draft_tokens_handler = DraftTreesHandler(device, self.speculator.drafts)
        checks.check_hidden_size(self.pair.proposer, self.speculator.hidden_size)

    def begin_budget(self, planner: Planner, temperature: DraftTemperature | None = None) -> None:
        """Ranks that must agree on every number keep to the costs and the temperature of the start."""
        assert self.budget is not None
        alone = get_tp_group().world_size == 1
        self.budget.budget, self.budget.learns, self.budget.live = planner, True, alone
        self.budget.temperature = temperature if alone else None
        planner.probe += SETTLED

    @property
    def off(self) -> bool:
        """Whether the start-up check has switched trees off."""
        return bool(self.speculator.off)

    def switch_off(self) -> None:
        """No trees any more: every step is vLLM's plain decoding, and the draft runs nothing."""
        self.speculator.off, self.speculator.backlog, self.backlog = True, None, None
        self.speculator.drafts.forget()
        self.adaptive_verification = NoNodes(self.speculator.drafts, self.input_buffers.query_start_loc, None)
        if self.cudagraph_manager is not None:  # a whole graph may hold our attention
            every = self.cudagraph_manager._candidates
            for size, graphs in every.items():
                every[size] = [graph for graph in graphs if graph.cg_mode != CUDAGraphMode.FULL]

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        checks.check_draft_groups(kv_cache_config.kv_cache_groups, self.speculator.draft_attn_layer_names)
        selection = NodeSelection(self.speculator.drafts, self.input_buffers.query_start_loc, self.budget)
        graphs = self.buffers is not None and self.compilation_config.cudagraph_mode.has_full_cudagraphs()
        # With it vLLM captures whole graphs for batches of unequal trees; it asks for them, so not without any.
        with swapped(
            model_runner, "maybe_create_adaptive_verification_manager", lambda **_: selection if graphs else None
        ):
            super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if self.budget is not None:
            self.adaptive_verification = selection
        if self.options.tree.budget == "auto" and self.speculator.reads_late:
            group = self.kv_cache_config.kv_cache_groups[self.speculator.group]
            coverage = Coverage(self.kv_cache_config.num_blocks, group.kv_cache_spec.block_size)
            coverage.renew(slice(None))
            slack = IN_FLIGHT * self.options.num_speculative_tokens
            self.backlog = DraftBacklog(coverage, self.max_num_reqs, slack, self.speculator.limit)
            self.speculator.backlog = self.backlog
        if self.buffers is not None:
            groups = enumerate(self.kv_cache_config.kv_cache_groups)
            self.buffers.open_caches({name: number for number, group in groups for name in group.layer_names})
        elif self.device.type == "cpu":
            for name, layer in checks.attention_layers(self.vllm_config).items():
                checks.check_packing(name, layer)

    def _speculator(self, vllm_config: Any, device: torch.device, req_states: Any) -> TreeDrafting:
        kind = SPECULATORS.get(str(self.options.draft), TextSpeculator)
        return kind(vllm_config, device, self, req_states)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        speculator = self.speculator
        layers, draft = speculator.draft_attn_layer_names, getattr(speculator, "model", None)
        rows = max(requests * speculator.width(requests) for requests in range(1, 1 + self.max_num_reqs))
        memory = draft_memory(self, layers, draft, rows=rows)
        named = checks.is_named(self.model_config)
        self.draft_memory = memory._replace(profiled=getattr(speculator, "level_keys", None) is not None)
        for name, layer in checks.attention_layers(self.vllm_config).items():
            drafts = name in speculator.draft_attn_layer_names
            checks.check_layer(name, layer, plain=drafts or not named)
            if not drafts:
                checks.check_window(name, Law.of(layer.impl).window, speculator.levels)
            trees = PagedTreeAttention if compiles(self.device) else CPUTreeAttention
            trees.adopt(layer, drafts=drafts)
        if self.batch_sharder is not None or self.sampler.return_sampling_mask:
            raise ValueError("return_sampling_mask and a sampler sharded over ranks are not supported with trees")
        nodes = self.options.num_speculative_tokens
        self.in_generation_order = nodes <= verification.IN_GENERATION_ORDER
        if compiles(self.device):
            layers = checks.attention_layers(self.vllm_config).items()
            own = {name: layer for name, layer in layers if name not in speculator.draft_attn_layer_names}
            sizes = self.max_num_reqs, self.max_num_tokens, nodes
            self.buffers = TargetBuffers(own, *sizes, self.model_config.dtype, self.device)
        self.rejection_sampler = TreeSampler(
            self.sampler,
            self.pair,
            levels=self.speculator.levels,
            nodes=nodes,
            flags=self.flags,
        )
        self.native_metadata = self.model_state.prepare_attn
        self.model_state.prepare_attn = self._metadata

    def _remove_request(self, req_id: str) -> bool:
        """Called if a request has ended, is preempted, or comes again with more input."""
        index = self.req_states.req_id_to_index.get(req_id)
        if index is not None:
            self.speculator.forget(req_id)
            if self.backlog is not None:
                self.backlog.removed(index)
        removed: bool = super()._remove_request(req_id)
        return removed

    def add_requests(self, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)
        if self.backlog is not None:
            for source, target in scheduler_output.kv_cache_block_copies or ():
                self.backlog.copied(source, target)
        for new in scheduler_output.scheduled_new_reqs:
            request = self.req_states.req_id_to_index[new.req_id]
            self.flags.add(request, new.sampling_params)
            if self.backlog is not None:
                self.backlog.added(request, new.block_ids[self.speculator.group], new.num_computed_tokens)

    def update_requests(self, scheduler_output: Any) -> None:
        super().update_requests(scheduler_output)
        if self.backlog is not None:
            running = scheduler_output.scheduled_cached_reqs
            for request, blocks in zip(running.req_ids, running.new_block_ids, strict=True):
                if blocks is not None:
                    index = self.req_states.req_id_to_index[request]
                    self.backlog.extended(index, blocks[self.speculator.group])

    def prepare_attn(self, input_batch: Any) -> Any:
        prepared = super().prepare_attn(input_batch)  # slots of linear positions
        self.lora_state.verified(input_batch)
        self.step = None
        drafts = input_batch.num_draft_tokens
        if self.buffers is not None and self.in_generation_order:
            laid_out = Verification.laid_out(self.speculator.drafts, input_batch, self.buffers.layout)
            self.step = laid_out if drafts else None
        elif drafts:
            step = Verification.of(self.speculator.drafts, input_batch)
            self.step = step if step.reads_only_roots(input_batch) else step.plain
            self.step.write_rows(input_batch.positions, input_batch.input_ids)
            input_batch.input_ids.clamp_(min=0)
        self.rejection_sampler.step = self.step
        return prepared

    def _metadata(
        self, input_batch: Any, mode: Any, block_tables: Any, slot_mappings: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        metadata = self.native_metadata(input_batch, mode, block_tables, slot_mappings, *rest, **kwargs)
        # Such a graph replays our kernel, also for a step without a tree; vLLM records it under another name.
        whole = mode == CUDAGraphMode.FULL or kwargs.get("for_capture", False)
        step = self.step
        if not whole and (step is None or not step.reads_only_roots(input_batch)):
            return metadata
        row_start, count, rows = (
            input_batch.query_start_loc,
            input_batch.num_reqs_after_padding,
            len(input_batch.positions),
        )
        if not whole:
            assert step is not None
            count = int(np.count_nonzero(step.scheduled))
            rows = count + input_batch.num_draft_tokens
        if self.buffers is not None and self.in_generation_order:
            self.buffers.plan(row_start, count)
        own: dict[Any, DenseTrees | KernelTrees] = {}
        for group, slots in zip(self.kv_cache_config.kv_cache_groups, slot_mappings, strict=True):
            for name in group.layer_names:
                if name in self.speculator.draft_attn_layer_names:
                    continue
                native = metadata[name]
                if self.buffers is not None and self.in_generation_order:
                    metadata[name] = self.buffers.metadata(name, native, row_start, count, rows)
                    continue
                assert step is not None
                if id(native) not in own:
                    longest = int(input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].max())
                    own[id(native)] = (
                        step.dense(native, group.kv_cache_spec.block_size, longest)
                        if self.buffers is None
                        else step.for_kernel(native, row_start, input_batch.num_draft_tokens)
                    )
                metadata[name], self.slots[name] = own[id(native)], slots
        self.metadata = metadata
        return metadata

    def execute_model(self, *args: Any, dummy_run: bool = False, **kwargs: Any) -> Any:
        with self.stats.times.phase("verify", dummy=dummy_run):
            return super().execute_model(*args, dummy_run=dummy_run, **kwargs)

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        with self.stats.times.phase("accept"):
            return self._accepted(hidden_states, input_batch, grammar_output)

    def _accepted(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        sampled = super().sample(hidden_states, input_batch, grammar_output)
        step, self.step, self.rejection_sampler.step = self.step, None, None
        accepted, self.rejection_sampler.accepted = self.rejection_sampler.accepted, None
        if step is not None and accepted is not None:
            tokens, nodes = accepted
            if self.budget is not None:
                greedy = self.flags.greedy[input_batch.idx_mapping_np]
                self.budget.verified(step.tree, accepted, greedy, step.order)
                logits = step.draft.logits
                if logits is not None and self.budget.temperature is not None:
                    certain = self.sampler.sampling_states.temperature.gpu[input_batch.idx_mapping] == 0
                    self.budget.fit(logits[step.draft.place, 0], tokens[:, 0], certain & step.tree.valid.any(1))
            self.stats.verified(step.tree)
            self.agreement.verified(step.tree, accepted)
            if self.buffers is not None:
                self.buffers.commit(self.block_tables.input_block_tables, step.root, nodes)
            else:
                step.commit(nodes, self.metadata, self.compilation_config.static_forward_context, self.slots)
            self.speculator.verified(step, accepted)
        if self.record is not None and self.record.open:
            self._recorded(sampled[0].sampled_token_ids, step, accepted, input_batch)
        return sampled

    def _recorded(self, sampled: Tensor, step: Verification | None, accepted: Accepted | None, batch: Any) -> None:
        """`sampled` [R, S]: of a step without a tree."""
        assert self.record is not None
        names, rows = batch.req_ids, batch.num_scheduled_tokens
        if step is None or accepted is None:
            position, empty = (batch.seq_lens[: batch.num_reqs] - 1).tolist(), [0] * batch.num_reqs
            self.record.verified(names, rows == 1, position, empty, torch.full_like(sampled[:, :1], -1), sampled[:, :1])
            return
        nodes, count = accepted.nodes, step.tree.valid.sum(1)
        if step.order is not None:
            nodes = torch.where(nodes >= 0, step.order.gather(1, nodes.clamp(min=0)), -1)
        others = rows - step.scheduled
        self.record.verified(names, others == 1, step.root.tolist(), count.tolist(), nodes, accepted.tokens)

    def sample_tokens(self, grammar_output: Any) -> Any:
        sampling = self.execute_model_state is not None
        output = super().sample_tokens(grammar_output)
        dead, self.speculator.dead = self.speculator.dead, None
        if dead is not None:
            self.stats.lost(dead)
        if sampling and output is not None:
            output = self.stats.on(output, self.budget, off=self.off)
        if self.profile is not None:
            self.profile.tick()
        return output
