"""vLLM's V1 model runner on a CPU with trees: the hooks, in the order of a step."""

import gc
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_adaptive_tree.budget import Budget, DraftTemperature
from vllm_adaptive_tree.engine.common.attention import adopt_layers
from vllm_adaptive_tree.engine.common.loads import first_loaded
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.engine.drafts.registry import kind_in
from vllm_adaptive_tree.engine.grammar.copies import Grammars
from vllm_adaptive_tree.engine.grammar.structured_outputs import acceptable_of, masks_of
from vllm_adaptive_tree.engine.grammar.walk import TreeTokens
from vllm_adaptive_tree.engine.metrics.step_record import step_record
from vllm_adaptive_tree.engine.names import DRAFTS
from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.startup.cost_profile import CostProfile
from vllm_adaptive_tree.engine.startup.finish import check_ranks, draft_memory, tree_options
from vllm_adaptive_tree.engine.targets import checks
from vllm_adaptive_tree.engine.v1.attention import VerifyAttention
from vllm_adaptive_tree.engine.v1.budget import HostBudget
from vllm_adaptive_tree.engine.v1.clock import PhaseClock
from vllm_adaptive_tree.engine.v1.host_draft import HostDraft
from vllm_adaptive_tree.engine.v1.host_engine import HostEngine, Rows
from vllm_adaptive_tree.engine.v1.processors import all_processors
from vllm_adaptive_tree.engine.v1.prompt_embeds import clear_stale_tokens
from vllm_adaptive_tree.engine.v1.recorder import Recorder
from vllm_adaptive_tree.engine.v1.seeds import Seeds, without_discarded
from vllm_adaptive_tree.engine.v1.target_attention import TargetAttention
from vllm_adaptive_tree.engine.v1.thinking_budget import ThinkingBudgets
from vllm_adaptive_tree.engine.v1.verification import NO_TREE
from vllm_adaptive_tree.methods import resolve, verifiable_lookup
from vllm_adaptive_tree.registry import imported
from vllm_adaptive_tree.step import TreeStep


class TreeModelRunner(CPUModelRunner):
    loaded: Mapping[str, int] = MappingProxyType({})
    """First position that a KV connector may have brought, of the requests that come with this step."""

    def __init__(self, vllm_config: Any, device: torch.device):
        check_ranks(vllm_config)
        kind = kind_in(tree_options(vllm_config))
        with (
            swapped(gpu_model_runner, kind.replaces, imported(str(kind.proposer))),
            swapped(gpu_model_runner, "build_logitsprocs", all_processors),
        ):
            super().__init__(vllm_config, device)
        self.options = tree_options(vllm_config)
        self.pair = resolve(self.options)
        self.proposer = self.pair.proposer.for_cpu()
        self.drafter.runner = self
        checks.check_hidden_size(self.proposer, self.drafter.hidden_size)
        # Draft after bookkeeping, from token lists; vLLM's padded drafting is for its own chains.
        self.speculative_config.disable_padded_drafter_batch = True
        self.engine = HostEngine(self)
        self.step = TreeStep(self.pair, self.engine)
        self.known_grammars = Grammars(vllm_config)
        self.seeds = Seeds(vllm_config.model_config.seed)
        lookup = self.options.lookup
        vocabulary = vllm_config.model_config.get_vocab_size()
        self.lookup = None if lookup is None else lookup.build(vocabulary, compiled=True)
        self.offers = self.lookup or verifiable_lookup(getattr(self.drafter, "draft", None), self.pair)
        """Look-up that proposes trees while the draft rests."""
        self.steering = ThresholdController(self.proposer, self.options.tree.steered)
        self.cuts_sampled = self.proposer.kind != "one_hot"
        """True if the budget cuts trees of sampled children."""
        self.profile: CostProfile | None = None
        self.clock = PhaseClock()
        self.budget: HostBudget | None = None
        if isinstance(most := self.options.tree.budget, int):
            self.begin_budget(Budget(sampled=self.cuts_sampled, most=most, drafts=not self.pair.looks_up))
        self.attention = TargetAttention(self)
        self.recorder: Recorder | None = None
        self.record = step_record(vllm_config, self.options)

    def begin_budget(self, budget: Budget, temperature: DraftTemperature | None = None) -> None:
        self.budget = HostBudget(budget, self.steering, self.clock)
        self.budget.temperature = temperature

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        if self.supports_mm_inputs:
            checks.check_images(self.model_config.model, self.model)
        gc.collect()  # handles of weights that a head has dropped, which must not be freed while torch compiles
        layers = self.drafter.layers
        self.draft_memory = draft_memory(self, layers, getattr(self.drafter, "model", None), requests=self.max_num_reqs)
        # The grown contexts of a draft with K/V are read out of the cache as they are.
        adopt_layers(self.vllm_config, layers, VerifyAttention, caches=() if layers else checks.FP8_ON_CPUS)
        self.model.compute_logits = self.clock.phase("verify")(self.model.compute_logits)

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        checks.check_draft_groups(kv_cache_config.kv_cache_groups, self.drafter.layers)
        super().initialize_kv_cache(self.attention.extended(kv_cache_config), *args, **kwargs)
        self.input_batch.thinking_budget_state_holder = ThinkingBudgets.of(self.vllm_config, self.device)
        self.attention.begin_cache()
        self.drafter.begin_cache(self.kv_cache_config.num_blocks)
        checks.check_packing(checks.attention_layers(self.vllm_config))

    # -- requests that leave

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Drop the state of requests that leave, as vLLM does here, in steps without a token too. A name may come back
        in the same step."""
        finished = scheduler_output.finished_req_ids
        new = (request.req_id for request in scheduler_output.scheduled_new_reqs)
        sessions = {name for name in new if name in self.requests and name not in finished}
        self.engine.forget((*finished, *(scheduler_output.preempted_req_ids or ()), *sessions))
        self.seeds.forget(finished)
        self.known_grammars.forget(finished)
        self.known_grammars.leave(sessions)
        rewritten = finished | sessions  # a session continues with more input, without its last tokens
        self.drafter.forget(rewritten)
        if self.lookup is not None:
            self.lookup.forget(rewritten)
        if self.vllm_config.kv_transfer_config is not None:
            self.loaded = first_loaded(scheduler_output)
        updated = super()._update_states(scheduler_output)
        clear_stale_tokens(self.input_batch)
        return updated

    # -- verify: the trees of this step, their positions, their mask

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        return super().execute_model(self.engine.affordable(scheduler_output), *args, **kwargs)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        if self.budget is not None:
            self.budget.begin_step()
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        counts = num_scheduled_tokens.tolist()
        computed = self.input_batch.num_computed_tokens_cpu[: len(counts)].tolist()
        positions = self.positions[: sum(counts)]
        linear = positions.clone() if self.uses_mrope else positions
        self.step.verify(Rows(scheduler_output, counts, computed, prepared[0]))
        if self.uses_mrope:
            self.mrope_positions.gpu[:, : len(positions)] += positions - linear
        return prepared

    def _calc_spec_decode_metadata(self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray) -> Any:
        """Rows of the logits alone: vLLM's rejection sampler does not run."""
        counts = 1 + num_draft_tokens
        first = np.repeat(cu_num_scheduled_tokens - counts.cumsum(), counts)
        return SimpleNamespace(logits_indices=torch.from_numpy(first + np.arange(len(first))))

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        self.attention.add_trees(metadata, self.step.verification)
        return metadata, common

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("verify"):
            return super()._model_forward(*args, **kwargs)

    # -- accept and commit

    def sample_tokens(self, grammar_output: Any) -> Any:
        verification = None if self.execute_model_state is None else self.step.verification
        self.grammars = self.known_grammars.of(grammar_output, self.requests)
        self.acceptable = acceptable_of(grammar_output)
        masks = masks_of(grammar_output, self.engine.scheduled_tokens, self.engine.verified_tokens)
        with without_discarded(self.input_batch.generators, self.discard_request_mask.np):
            output = super().sample_tokens(masks)
        self.grammars = {}
        self.step.end()
        self.engine.end()
        if verification is not None:
            output.cudagraph_stats = self.engine.figures(verification).stat()
            setattr(output, DRAFTS, self.take_draft_token_ids())
        if self.profile is not None:
            self.profile.tick()
        return output

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        verification = self.step.verification
        assert logits is not None
        assert verification is not None
        with self.clock.phase("accept"), self.engine.sampling(logits, verification, self.acceptable) as target:
            accepted = self.step.accept(target, self.engine.requests)
        with self.clock.phase("commit"):
            self.step.commit()
        return SamplerOutput(sampled_token_ids=accepted.tokens.int(), logprobs_tensors=target.logprobs())

    # -- draft: catch up, grow

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return common_attn_metadata is not None  # limits are per request; vLLM's test would stop the whole batch

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        *rest: Any,
    ) -> list[list[int]]:
        sampled = [bool(tokens) for tokens in sampled_token_ids]
        states = aux_hidden_states or [hidden_states]
        row = self.input_batch.req_id_to_index
        grammars = {row[name]: (walk, sampled_token_ids[row[name]]) for name, walk in self.grammars.items()}
        self.step.draft(HostDraft(self, scheduler_output.num_scheduled_tokens, sampled, states, grammars))
        for walk in self.grammars.values():
            walk.close()
        drafted = (self.engine.drafts.get(name) for name in self.input_batch.req_ids)
        trees = (NO_TREE if draft is None else draft.tree for draft in drafted)
        return [TreeTokens(tree.tokens, tree.parents) for tree in trees]
