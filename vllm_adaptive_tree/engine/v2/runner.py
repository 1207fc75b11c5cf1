"""vLLM's Model Runner V2 with trees: the hooks, in the order of a step."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_adaptive_tree.budget import Budget, DraftTemperature, Planner
from vllm_adaptive_tree.engine.common.attention import CPUTreeAttention, adopt_layers
from vllm_adaptive_tree.engine.common.ranks import objects_of_all
from vllm_adaptive_tree.engine.common.request_flags import RequestFlags
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.engine.drafts.registry import kind_in
from vllm_adaptive_tree.engine.metrics.step_record import step_record
from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.startup.cost_profile import CostProfile
from vllm_adaptive_tree.engine.startup.finish import check_ranks, draft_memory, tree_options
from vllm_adaptive_tree.engine.targets import checks
from vllm_adaptive_tree.engine.targets.auxiliary import reads_layers
from vllm_adaptive_tree.engine.v2.acceptance import DeviceAcceptance
from vllm_adaptive_tree.engine.v2.adapters import Adapters
from vllm_adaptive_tree.engine.v2.attention import PagedTreeAttention
from vllm_adaptive_tree.engine.v2.budget import DeviceBudget
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.device_engine import DeviceEngine
from vllm_adaptive_tree.engine.v2.draft_backlog import DraftBacklog
from vllm_adaptive_tree.engine.v2.draft_tokens import DraftTreesHandler
from vllm_adaptive_tree.engine.v2.drafting import TreeDrafting
from vllm_adaptive_tree.engine.v2.graphs import drop_whole_graphs, of_plain_decodes, with_fullest
from vllm_adaptive_tree.engine.v2.latent import LatentAttention, PagedLatentAttention
from vllm_adaptive_tree.engine.v2.node_selection import NodeSelection, NoNodes
from vllm_adaptive_tree.engine.v2.rank_agreement import RankAgreement
from vllm_adaptive_tree.engine.v2.rope import TreeRopeState
from vllm_adaptive_tree.engine.v2.sampler import TreeSampler
from vllm_adaptive_tree.engine.v2.step_stats import StepStats
from vllm_adaptive_tree.engine.v2.target_attention import TargetAttention
from vllm_adaptive_tree.engine.v2.token_history import states_of_look_ups
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.registry import imported
from vllm_adaptive_tree.step import TreeStep

if current_platform.is_cpu():
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner as ModelRunner
else:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as ModelRunner

logger = init_logger(f"vllm.{__name__}")


class TreeModelRunnerV2(ModelRunner):
    def __init__(self, vllm_config: Any, device: torch.device):
        check_ranks(vllm_config)
        self.options = tree_options(vllm_config)
        self.pair = resolve(self.options)
        if compiles(device):
            self.pair = self.pair._replace(proposer=self.pair.proposer.for_gpu())
        self.steering = ThresholdController(self.pair.proposer, self.options.tree.steered)
        most = self.options.tree.budget
        fixed = Budget(sampled=False, most=most if isinstance(most, int) else None)
        self.stats, self.agreement = StepStats(device), RankAgreement()
        schedule = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        sizes = vllm_config.scheduler_config.max_num_seqs, self.options.num_speculative_tokens
        # beside replicas vLLM drops it
        quotas = None if schedule is None else build_dynamic_sd_schedule_lookup(schedule, *sizes)
        times = self.stats.times
        self.budget = None if most is None else DeviceBudget(fixed, self.steering, times, learns=False, quotas=quotas)
        self.cuts_sampled = False  # the number of nodes is chosen before the trees are sampled: any choice is lossless
        self.adaptive_verification: NodeSelection | None
        self.use_aux_hidden_state_outputs: bool
        self.profile: CostProfile | None = None
        self.engine = DeviceEngine(self)
        self.step = TreeStep(self.pair, self.engine)
        self.record = step_record(vllm_config, self.options)
        table = self.pair.proposer.acceptance
        self.acceptance = None if table is None else DeviceAcceptance(table)
        self.flags = RequestFlags(vllm_config.scheduler_config.max_num_seqs, self.pair, self.options)
        reads_texts = self.options.lookup is not None or self.options.text is not None
        states = states_of_look_ups if reads_texts else model_runner.RequestState
        with (
            swapped(model_runner, "init_speculator", self._speculator),
            swapped(model_runner, "RequestState", states),
        ):
            super().__init__(vllm_config, device)
        if self.use_aux_hidden_state_outputs:  # vLLM 0.32 takes them for every EAGLE-3 head
            self.use_aux_hidden_state_outputs = reads_layers(self.speculative_config.draft_model_config.hf_config)
        self.lora_state = Adapters(self.max_num_reqs)
        self.draft_tokens_handler = DraftTreesHandler(device, self.speculator.drafts)
        checks.check_hidden_size(self.pair.proposer, self.speculator.hidden_size)

    def begin_budget(self, planner: Planner, temperature: DraftTemperature | None = None) -> None:
        assert self.budget is not None
        self.budget.begin_learning(planner, temperature, alone=get_tp_group().world_size == 1)

    @property
    def off(self) -> bool:
        """True if the start-up check has switched trees off."""
        return bool(self.speculator.off)

    def switch_off(self) -> None:
        """Stop drafting trees: every step is vLLM's plain decoding. The draft runs nothing, and its graphs are freed.
        Whole graphs of the target hold our attention, and are recorded again without it."""
        self.speculator.off, self.speculator.backlog = True, None
        self.speculator.drafts.forget()
        self.adaptive_verification = self._selection(NoNodes, None)
        self.attention.off = True
        manager = self.cudagraph_manager
        held = next(iter(manager.graphs.values()), None) if manager is not None else None
        self.speculator.release_graphs()
        if held is not None:  # PyTorch keeps the pool of graphs while there is one
            self._capture_fullest(self.max_num_reqs)
            of_plain_decodes(manager)
            self._capture_plain()

    def _capture_plain(self) -> None:
        """Record the target's graphs again. Raises nothing: without them decodes run in pieces."""
        sees = self.supports_mm_inputs
        aside = swapped(self.model_state.encoder_runner, "has_cudagraph", lambda: False) if sees else nullcontext()
        failed = ""
        try:
            with aside:  # its graphs are as they were
                self.capture_model()
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        reasons = [reason for reason in objects_of_all(failed) if reason]
        if reasons:
            logger.warning("No whole CUDA graphs could be recorded without trees: %s", reasons[0])
            self.drop_whole_graphs()
            self.cudagraph_manager._graphs_captured = True  # pieces, which come first

    def drop_whole_graphs(self) -> bool:
        """Run decodes of the target in pieces, as prompts; return whether there were whole graphs."""
        return self.cudagraph_manager is not None and drop_whole_graphs(self.cudagraph_manager)

    def _capture_fullest(self, rows: int) -> None:
        """Let the fullest batch of decodes, of so many rows, have a graph."""
        if rows % self.parallel_config.tensor_parallel_size == 0:  # as sequence parallelism asks
            config = self.compilation_config
            config.cudagraph_capture_sizes = with_fullest(config.cudagraph_capture_sizes, rows)

    def _selection(self, kind: type[NodeSelection], budget: DeviceBudget | None) -> NodeSelection:
        most = get_max_chunk_logits(self.model_config.get_vocab_size())
        return kind(
            self.speculator.drafts,
            self.input_buffers.query_start_loc,
            budget,
            most_rows=most,
            by_place=self.steering.proposer.by_place,
            on_host=self.lora_config is not None,
        )

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        self.attention.latent = {}  # of the cache that vLLM profiles with
        checks.check_draft_groups(kv_cache_config.kv_cache_groups, self.speculator.draft_attn_layer_names)
        selection = self._selection(NodeSelection, self.budget)
        graphs = self.attention.buffers is not None and self.compilation_config.cudagraph_mode.has_full_cudagraphs()
        if graphs:
            self._capture_fullest(self.max_num_reqs * self.decode_query_len)
        # With a selection vLLM captures whole graphs for unequal trees; it asks for them, so not without any.
        # It would refuse one of its own beside recurrent layers, whose plans may follow the host's lengths. Those of
        # gated delta nets read only their sums, and take the rows of a chain from the device's `query_start_loc`.
        with swapped(
            model_runner, "maybe_create_adaptive_verification_manager", lambda **_: selection if graphs else None
        ):
            super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if self.speculator.selected:
            self.adaptive_verification = selection
        skips = self.speculator.may_rest or self.vllm_config.kv_transfer_config is not None
        if skips and self.speculator.reads_late:
            self.speculator.backlog = DraftBacklog.of(self.speculator, self.kv_cache_config, self.max_num_reqs)
        self.attention.open_caches()

    def _speculator(self, vllm_config: Any, device: torch.device, req_states: Any) -> TreeDrafting:
        speculator: TreeDrafting = imported(str(kind_in(self.options).speculator))(
            vllm_config, device, self, req_states
        )
        return speculator

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.supports_mm_inputs:
            checks.check_images(self.model_config.model, self.model)
        self.rope = TreeRopeState.of(self.model_state)
        speculator = self.speculator
        layers, draft = speculator.draft_attn_layer_names, getattr(speculator, "model", None)
        most = speculator.most_trees
        rows = max(requests * speculator.width(requests) for requests in range(1, 1 + most))
        memory = draft_memory(self, layers, draft, requests=most, rows=rows)
        self.draft_memory = memory._replace(profiled=getattr(speculator, "level_keys", None) is not None)
        gpu = compiles(self.device)
        kinds = (PagedTreeAttention, PagedLatentAttention) if gpu else (CPUTreeAttention, LatentAttention)
        adopt_layers(self.vllm_config, layers, *kinds, caches=checks.FP8 if gpu else (), levels=speculator.levels)
        if self.batch_sharder is not None or self.sampler.return_sampling_mask:
            raise ValueError("return_sampling_mask and a sampler sharded over ranks are not supported with trees")
        self.attention = TargetAttention(self)
        nodes = self.options.num_speculative_tokens
        self.rejection_sampler = TreeSampler(self.sampler, self.step, self.flags, nodes=nodes)

    def _remove_request(self, req_id: str) -> bool:
        """Remove a request that has ended, is preempted, or comes again with more input."""
        index = self.req_states.req_id_to_index.get(req_id)
        if index is not None:
            self.speculator.forget(req_id)
            if self.speculator.backlog is not None:
                self.speculator.backlog.removed(index)
        removed: bool = super()._remove_request(req_id)
        return removed

    def add_requests(self, scheduler_output: Any) -> None:
        if scheduler_output.kv_cache_block_copies:
            self.speculator.settle()
        super().add_requests(scheduler_output)
        index = self.req_states.req_id_to_index
        for new in scheduler_output.scheduled_new_reqs:
            self.flags.add(index[new.req_id], new.sampling_params)
        if self.speculator.backlog is not None:
            self.speculator.backlog.started(scheduler_output, index)

    def update_requests(self, scheduler_output: Any) -> None:
        super().update_requests(scheduler_output)
        if self.speculator.backlog is not None:
            self.speculator.backlog.continued(scheduler_output.scheduled_cached_reqs, self.req_states.req_id_to_index)

    def prepare_attn(self, input_batch: Any) -> Any:
        prepared = super().prepare_attn(input_batch)  # slots of linear positions
        self.lora_state.verified(input_batch)
        linear = None if self.rope is None else input_batch.positions.clone()
        self.step.verify(input_batch)
        if self.rope is not None:
            self.rope.moved = input_batch.positions - linear
        return prepared

    def execute_model(self, scheduler_output: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> Any:
        if self.adaptive_verification is not None and not dummy_run:
            scheduler_output = self.adaptive_verification.run(scheduler_output)
        with self.stats.times.phase("verify", dummy=dummy_run):
            return super().execute_model(scheduler_output, *args, dummy_run=dummy_run, **kwargs)

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        with self.stats.times.phase("accept"):
            sampled = super().sample(hidden_states, input_batch, grammar_output)
            if self.step.accepted is not None:
                self.step.commit()
            else:
                self.engine.observe_plain(sampled[0])
        return sampled

    def sample_tokens(self, grammar_output: Any) -> Any:
        sampling = self.execute_model_state is not None
        output = super().sample_tokens(grammar_output)
        self.step.end()
        dead, self.speculator.dead = self.speculator.dead, None
        if dead is not None:
            self.stats.lost(dead)
        if sampling and output is not None:
            output = self.stats.on(output, self.budget, off=self.off)
        if self.profile is not None:
            self.profile.tick()
        return output
