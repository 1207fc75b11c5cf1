"""vLLM's V1 model runner on a CPU with trees: the hooks, in the order of a step."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_adaptive_tree.budget import Budget, DraftTemperature
from vllm_adaptive_tree.engine import checks
from vllm_adaptive_tree.engine.common.attention import CPUTreeAttention
from vllm_adaptive_tree.engine.common.cost_profile import CostProfile
from vllm_adaptive_tree.engine.common.grammar import GrammarWalk, TreeTokens
from vllm_adaptive_tree.engine.common.ranks import accepted_from_rank_0
from vllm_adaptive_tree.engine.common.request_flags import draws_from_target, is_greedy
from vllm_adaptive_tree.engine.common.startup import check_ranks, draft_memory, tree_options
from vllm_adaptive_tree.engine.common.steering import Steering
from vllm_adaptive_tree.engine.common.step_figures import StepFigures, by_depth
from vllm_adaptive_tree.engine.common.step_record import step_record
from vllm_adaptive_tree.engine.common.structured_outputs import masks_of
from vllm_adaptive_tree.engine.one_forward import CLASSES
from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.v1 import scratch
from vllm_adaptive_tree.engine.v1.acceptance import Requests, accept, held
from vllm_adaptive_tree.engine.v1.block_drafter import BlockDrafter
from vllm_adaptive_tree.engine.v1.budget import HostBudget
from vllm_adaptive_tree.engine.v1.clock import PhaseClock
from vllm_adaptive_tree.engine.v1.drafting_step import DraftingStep
from vllm_adaptive_tree.engine.v1.drafts import Draft
from vllm_adaptive_tree.engine.v1.grammars import Grammars
from vllm_adaptive_tree.engine.v1.head_drafter import HeadDrafter
from vllm_adaptive_tree.engine.v1.model_drafter import ModelDrafter
from vllm_adaptive_tree.engine.v1.parallel_drafter import ParallelDrafter
from vllm_adaptive_tree.engine.v1.recorder import Recorder
from vllm_adaptive_tree.engine.v1.scheduling import affordable, scheduled_draft, without_tree
from vllm_adaptive_tree.engine.v1.scratch import ScratchBlocks
from vllm_adaptive_tree.engine.v1.seeds import Seeds, without_discarded
from vllm_adaptive_tree.engine.v1.target import Target
from vllm_adaptive_tree.engine.v1.text_drafter import HostTextDrafter
from vllm_adaptive_tree.engine.v1.thinking_budget import ThinkingBudgets
from vllm_adaptive_tree.engine.v1.verification import NO_TREE, Verification
from vllm_adaptive_tree.methods import offering, resolve

HEADS = {"peagle": ParallelDrafter, **dict.fromkeys(CLASSES, BlockDrafter)}
"""Kinds of drafts that are EAGLE-3 heads to vLLM's scheduler."""


def _medusa() -> AbstractContextManager[None]:
    """vLLM 0.33 has no Medusa, and `draft_checks` refuses it there."""
    if not hasattr(gpu_model_runner, "MedusaProposer"):
        return nullcontext()
    from vllm_adaptive_tree.engine.v1.medusa_drafter import MedusaDrafter

    return swapped(gpu_model_runner, "MedusaProposer", MedusaDrafter)


class TreeModelRunner(CPUModelRunner):
    def __init__(self, vllm_config: Any, device: torch.device):
        check_ranks(vllm_config)
        with (
            swapped(gpu_model_runner, "DraftModelProposer", ModelDrafter),
            swapped(gpu_model_runner, "EagleProposer", HEADS.get(str(tree_options(vllm_config).draft), HeadDrafter)),
            _medusa(),
            swapped(gpu_model_runner, "create_custom_proposer", HostTextDrafter),
            swapped(gpu_model_runner, "build_logitsprocs", _all_processors),
        ):
            super().__init__(vllm_config, device)
        self.options = tree_options(vllm_config)
        self.pair = resolve(self.options)
        self.proposer = self.pair.proposer.for_cpu()
        self.drafter.runner = self
        checks.check_hidden_size(self.proposer, self.drafter.hidden_size)
        # Draft after bookkeeping, from token lists; vLLM's padded drafting is for its own chains.
        self.speculative_config.disable_padded_drafter_batch = True
        self.drafts: dict[str, Draft] = {}  # drafted, not yet scheduled
        self.scheduled: dict[int, Draft] = {}  # of this step, by row
        self.known_grammars = Grammars(vllm_config)
        self.grammars: Mapping[str, GrammarWalk] = {}  # of this step's requests, as the scheduler's stand
        self.asked: Mapping[str, list[int]] = {}  # draft tokens of this step as scheduled, and those verified
        self.verified: Mapping[str, list[int]] = {}
        self.seeds = Seeds(vllm_config.model_config.seed)
        lookup = self.options.lookup
        self.lookup = None if lookup is None else lookup.build(vllm_config.model_config.get_vocab_size())
        self.offers = self.lookup or offering(getattr(self.drafter, "draft", None), self.pair)
        """What proposes trees while the draft rests."""
        self.steering = Steering(self.proposer, self.options.tree.steered)
        self.cuts_sampled = self.proposer.kind != "one_hot"
        """Whether the budget cuts trees of sampled children."""
        self.profile: CostProfile | None = None
        self.step: Verification | None = None
        self.without: dict[str, list[int]] = {}  # rows of this step without a tree, by reason
        self.accepted: dict[int, list[int]] = {}  # nodes of each tree of this step, by row
        self.initial: Tensor | None = None  # [R, W] tokens of the next first layer, by row
        self.clock = PhaseClock()
        self.budget: HostBudget | None = None
        if isinstance(most := self.options.tree.budget, int):
            self.begin_budget(Budget(sampled=self.cuts_sampled, most=most))
        self.scratch = ScratchBlocks(0)
        self.recorder: Recorder | None = None
        self.record = step_record(vllm_config, self.options)

    def begin_budget(self, budget: Budget, temperature: DraftTemperature | None = None) -> None:
        self.budget = HostBudget(budget, self.steering, self.clock)
        self.budget.temperature = temperature

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        self.draft_memory = draft_memory(self, self.drafter.layers, getattr(self.drafter, "model", None))
        named = checks.is_named(self.model_config)
        for name, layer in checks.attention_layers(self.vllm_config).items():
            drafts = name in self.drafter.layers
            # The grown contexts of a draft with K/V are read out of the cache as they are.
            coded = named and not self.drafter.layers
            checks.check_layer(name, layer, plain=drafts or not named, quantised_cache=coded)
            CPUTreeAttention.adopt(layer, drafts=drafts)
        self.model.compute_logits = self.clock.phase("verify")(self.model.compute_logits)

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        checks.check_draft_groups(kv_cache_config.kv_cache_groups, self.drafter.layers)
        longest = self.num_spec_tokens // self.cache_config.block_size + 1  # blocks of a branch
        self.scratch = ScratchBlocks(scratch.COUNT + longest)
        super().initialize_kv_cache(self.scratch.extended(kv_cache_config), *args, **kwargs)
        self.input_batch.thinking_budget_state_holder = ThinkingBudgets.of(self.vllm_config, self.device)
        self.drafter.begin_cache(self.kv_cache_config.num_blocks)
        self.drafting = DraftingStep(self)
        for name, layer in checks.attention_layers(self.vllm_config).items():
            checks.check_packing(name, layer)

    # -- requests that leave

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM drops its own state here, in steps without a token too. A name may come back in the same step."""
        finished = scheduler_output.finished_req_ids
        for request in (*finished, *(scheduler_output.preempted_req_ids or ())):
            self.drafts.pop(request, None)
        self.seeds.forget(finished)
        self.known_grammars.forget(finished)
        self.drafter.forget(finished)
        if self.lookup is not None:
            self.lookup.forget(finished)
        updated, batch = super()._update_states(scheduler_output), self.input_batch
        stale = False
        for row in batch.req_prompt_embeds:  # the tokens of the row's last request stand in their place
            prompt = slice(batch.num_prompt_tokens[row])
            tokens, places = batch.token_ids_cpu[row, prompt], ~batch.is_token_ids[row, prompt]
            stale |= bool(tokens[places].any())
            tokens[places] = 0
        if stale:  # penalties have read them
            batch.sampling_metadata = batch._make_sampling_metadata()
        return updated

    # -- verify: the trees of this step, their positions, their mask

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self.asked = scheduler_output.scheduled_spec_decode_tokens
        scheduler_output = affordable(scheduler_output, self.drafts, self.budget)
        self.verified = scheduler_output.scheduled_spec_decode_tokens
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        if self.budget is not None:
            self.budget.begin_step()
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        drafts = {request: self.drafts.pop(request, None) for request in scheduler_output.num_scheduled_tokens}
        row = self.input_batch.req_id_to_index
        self.scheduled = {
            row[request]: scheduled_draft(drafts[request], tokens, request)
            for request, tokens in scheduler_output.scheduled_spec_decode_tokens.items()
        }
        self.without = without_tree(
            self.input_batch.req_ids,
            scheduler_output.scheduled_spec_decode_tokens,
            self.asked,
            drafts,
            self.drafting.without,
        )
        trees = {row: draft.tree for row, draft in self.scheduled.items()}
        counts = num_scheduled_tokens.tolist()
        computed = self.input_batch.num_computed_tokens_cpu[: len(counts)].tolist()
        self.step = Verification(trees, np.cumsum([0, *counts[:-1]]).tolist(), counts, computed)
        self.step.write_positions(self.positions)
        return prepared

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        step = self.step
        if step is None or not step.branching:
            return metadata, common
        for group, layers in self.target_groups():
            own = step.metadata(group.get_metadata_builder(0), layers, metadata[layers[0]], self.scratch)
            metadata.update(dict.fromkeys(layers, own))
        return metadata, common

    def target_groups(self) -> Iterator[tuple[Any, list[str]]]:
        """vLLM's attention groups that hold layers of the target, and those layers."""
        drafts = self.drafter.layers
        for group in (group for groups in self.attn_groups for group in groups):
            layers = [name for name in group.layer_names if name not in drafts]
            if layers:
                yield group, layers

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("verify"):
            return super()._model_forward(*args, **kwargs)

    # -- accept and commit

    def sample_tokens(self, grammar_output: Any) -> Any:
        sampling = self.execute_model_state is not None
        self.grammars = self.known_grammars.of(grammar_output, self.requests)
        with without_discarded(self.input_batch.generators, self.discard_request_mask.np):
            output = super().sample_tokens(masks_of(grammar_output, self.asked, self.verified))
        self.grammars = {}
        step, self.step = self.step, None
        self.scheduled, self.accepted, self.initial = {}, {}, None
        if sampling and step is not None:
            output.cudagraph_stats = self._figures(step).stat()
        if self.profile is not None:
            self.profile.tick()
        return output

    def _figures(self, step: Verification) -> StepFigures:
        """Of a step, and of all since the last one."""
        expected, observed = (0.0, 0.0) if self.budget is None else self.budget.budget.take()
        dead, self.drafting.dead = self.drafting.dead, 0
        grown, self.drafting.grown = self.drafting.grown, 0
        return StepFigures(
            seconds=self.clock.take(),
            nodes=by_depth(chain.from_iterable(step.depths.values())),
            drafted=grown,
            expected=expected,
            observed=observed,
            dead=dead,
            gauges={} if self.budget is None else self.budget.gauges,
            rows=[len(step.trees.get(row, ())) for row in range(len(step.row_count))],
            without=self.without,
        )

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        step = self.step
        assert step is not None
        with self.clock.phase("accept"):
            target = Target(self.sampler, self.input_batch.sampling_metadata, logits, step)
            accepted, logprobs, self.initial = accept(
                self.pair, target, step, self.scheduled, self._limits(step), lambda: self._requests(step)
            )
            tokens, nodes = accepted_from_rank_0(accepted, step.levels)
            paths = nodes.tolist()
            self.accepted = {row: [node for node in paths[row] if node >= 0] for row in step.trees}
            if self.initial is not None:
                tokens = tokens.masked_fill(held(tokens), -1)
        with self.clock.phase("commit"):
            step.commit(nodes, self.compilation_config.static_forward_context)
        if self.budget is not None:
            self.budget.verified(self.scheduled, tokens, nodes)
        if self.recorder is not None:
            self.recorder.see(self.scheduled, [self.requests[name] for name in self.input_batch.req_ids], nodes, target)
        if self.record is not None:
            counts = [len(step.trees.get(row, ())) for row in range(len(step.row_count))]
            decodes = (rows - nodes == 1 for rows, nodes in zip(step.row_count, counts, strict=True))
            self.record.verified(self.input_batch.req_ids, decodes, step.computed, counts, nodes, tokens)
        return SamplerOutput(sampled_token_ids=tokens.int(), logprobs_tensors=logprobs)

    def _limits(self, step: Verification) -> list[int]:
        """The most tokens to emit: up to `min_tokens`, since the sampler lifts its ban on stop tokens between steps."""
        states = [self.requests[request] for request in self.input_batch.req_ids]
        missing = [state.sampling_params.min_tokens - len(state.output_token_ids) for state in states]
        return [tokens if tokens > 0 else step.levels + 1 for tokens in missing]

    def _requests(self, step: Verification) -> Requests:
        states = [self.requests[request] for request in self.input_batch.req_ids]
        sampling = [state.sampling_params for state in states]
        return Requests(
            from_target=torch.tensor([draws_from_target(one, self.pair, self.options) for one in sampling]),
            greedy=torch.tensor([is_greedy(one) for one in sampling]),
            seed=self.seeds.of(states),
            position=torch.tensor(step.computed),
        )

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
        sampled = [bool(one) for one in sampled_token_ids]
        states = aux_hidden_states or [hidden_states]
        row = self.input_batch.req_id_to_index
        grammars = {row[name]: (walk, sampled_token_ids[row[name]]) for name, walk in self.grammars.items()}
        trees = self.drafting.propose(scheduler_output.num_scheduled_tokens, sampled, states, grammars)
        for walk in self.grammars.values():
            walk.close()
        self.drafts.update(trees)
        if self.budget is not None and self.step is not None:
            self.budget.end_step(self.step)
        drafted = [trees[name].tree if name in trees else NO_TREE for name in self.input_batch.req_ids]
        return [TreeTokens(tree.tokens, tree.parents) for tree in drafted]


def _all_processors(vllm_config: Any, *args: Any) -> Any:
    """The processors of plain decoding, min_p and logit_bias among them; vLLM drops those with speculation."""
    plain = copy.copy(vllm_config)
    plain.speculative_config = None
    return build_logitsprocs(plain, *args)
