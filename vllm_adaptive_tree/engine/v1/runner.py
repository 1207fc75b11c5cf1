"""The adapter to vLLM's V1 model runner on a CPU: the one file that walks requests on the host."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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

from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.budget import Budget, DraftTemperature
from vllm_adaptive_tree.engine import support
from vllm_adaptive_tree.engine.common import scratch
from vllm_adaptive_tree.engine.common.cost_profile import CostProfile
from vllm_adaptive_tree.engine.common.coverage import Coverage
from vllm_adaptive_tree.engine.common.cpu_attention import CPUTrees
from vllm_adaptive_tree.engine.common.kinds import draws_from_target, has_grammar, is_greedy
from vllm_adaptive_tree.engine.common.metrics import step_figures
from vllm_adaptive_tree.engine.common.options import tree_options
from vllm_adaptive_tree.engine.common.ranks import accepted_from_rank_0, agree, proposal_from_rank_0
from vllm_adaptive_tree.engine.common.scratch import ScratchBlocks
from vllm_adaptive_tree.engine.common.share import nodes_per_request
from vllm_adaptive_tree.engine.common.startup import check_ranks
from vllm_adaptive_tree.engine.common.steering import Steering
from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.v1.acceptance import Requests, accept, held
from vllm_adaptive_tree.engine.v1.budget import HostBudget
from vllm_adaptive_tree.engine.v1.clock import PhaseClock
from vllm_adaptive_tree.engine.v1.commit import commit
from vllm_adaptive_tree.engine.v1.drafter import CatchUp, ModelDrafter, TimedDrafter
from vllm_adaptive_tree.engine.v1.drafts import Draft, to_drafts
from vllm_adaptive_tree.engine.v1.recorder import Recorder
from vllm_adaptive_tree.engine.v1.target import Target
from vllm_adaptive_tree.engine.v1.thinking_budget import ThinkingBudgets
from vllm_adaptive_tree.engine.v1.verification import Verification
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers import Request, draft_tree
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE
from vllm_adaptive_tree.rng import CounterRNG


class TreeModelRunner(CPUModelRunner):
    def __init__(self, vllm_config: Any, device: torch.device):
        check_ranks(vllm_config)
        with (
            swapped(gpu_model_runner, "DraftModelProposer", ModelDrafter),
            swapped(gpu_model_runner, "build_logitsprocs", _all_processors),
        ):
            super().__init__(vllm_config, device)
        self.options = tree_options(vllm_config)
        self.pair = resolve(self.options)
        self.proposer = self.pair.proposer.for_cpu()
        support.check_hidden_size(self.proposer, self.speculative_config.draft_model_config.get_hidden_size())
        # Draft after bookkeeping, from token lists; vLLM's padded drafting is for its own chains.
        self.speculative_config.disable_padded_drafter_batch = True
        self.drafts: dict[str, Draft] = {}  # drafted, not yet scheduled
        self.scheduled: dict[int, Draft] = {}  # of this step, by row
        self.judged: dict[int, Draft] = {}  # the same with what a grammar has refused: to the budget, not accepted
        self.seeds: dict[str, int] = {}  # of requests that brought none
        self.steering = Steering(self.proposer, self.options.tree.steered)
        self.cuts_sampled = self.proposer.kind != "one_hot"
        """Whether the budget cuts trees of sampled children."""
        self.profile: CostProfile | None = None
        self.random = np.random.default_rng(vllm_config.model_config.seed)
        self.step: Verification | None = None
        self.initial: Tensor | None = None  # [R, W] tokens of the next first layer, by row
        self.clock = PhaseClock()
        self.budget: HostBudget | None = None
        if isinstance(most := self.options.tree.budget, int):
            self.begin_budget(Budget(sampled=self.cuts_sampled, most=most))
        self.coverage = Coverage(0, 1)
        self.dead = 0  # rows of the draft in this step
        self.scratch = ScratchBlocks(0)
        self.recorder: Recorder | None = None

    def begin_budget(self, budget: Budget, temperature: DraftTemperature | None = None) -> None:
        self.budget = HostBudget(budget, self.steering, self.clock)
        self.budget.temperature = temperature

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        for name, layer in self.compilation_config.static_forward_context.items():
            support.check_layer(name, layer)
            CPUTrees.adopt(layer, drafts=name in self.drafter._draft_attn_layer_names)
        self.model.compute_logits = self.clock.timed("verify", self.model.compute_logits)

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        longest = self.num_spec_tokens // self.cache_config.block_size + 1  # blocks of a branch
        self.scratch = ScratchBlocks(scratch.COUNT + longest)
        super().initialize_kv_cache(self.scratch.behind(kv_cache_config), *args, **kwargs)
        self.input_batch.thinking_budget_state_holder = ThinkingBudgets.of(self.vllm_config, self.device)
        self.coverage = Coverage(self.kv_cache_config.num_blocks, self.drafter._block_table().block_size)
        for name, layer in self.compilation_config.static_forward_context.items():
            support.check_packing(name, layer)

    # -- requests that leave

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM drops its own here, in steps without a token too. A name may come back in the same step."""
        finished = scheduler_output.finished_req_ids
        for request in (*finished, *(scheduler_output.preempted_req_ids or ())):
            self.drafts.pop(request, None)
        for request in finished:
            self.seeds.pop(request, None)
        self.drafter.contexts.forget(finished)
        return super()._update_states(scheduler_output)

    # -- verify: the trees of this step, their positions, their mask

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        return super().execute_model(self._affordable(scheduler_output), *args, **kwargs)

    def _affordable(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """Fewer nodes where a step also reads prompts, of which no tree knew. To the scheduler, with its own list, the
        others are rejected. A request with a grammar keeps all: the grammar was asked about each."""
        spec, rows = scheduled.scheduled_spec_decode_tokens, scheduled.num_scheduled_tokens
        decoding = len(rows) + sum(map(len, spec.values()))
        free = [name for name in spec if not has_grammar(self.requests[name].sampling_params)]
        if self.budget is None or not free or scheduled.total_num_scheduled_tokens == decoding:
            return scheduled
        drafts = [self.drafts[name].prefix(len(spec[name])) for name in free]
        others = scheduled.total_num_scheduled_tokens - sum(rows[name] for name in free)
        kept = dict(zip(free, self.budget.with_prompts(drafts, others), strict=True))
        trees = {name: tokens[: kept.get(name, len(tokens))] for name, tokens in spec.items()}
        fewer = {name: count - len(spec.get(name, ())) + len(trees.get(name, ())) for name, count in rows.items()}
        return replace(
            scheduled,
            scheduled_spec_decode_tokens={name: tokens for name, tokens in trees.items() if tokens},
            num_scheduled_tokens=fewer,
            total_num_scheduled_tokens=sum(fewer.values()),
        )

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        if self.budget is not None:
            self.budget.begin_step()
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        drafts = {request: self.drafts.pop(request, None) for request in scheduler_output.num_scheduled_tokens}
        row = self.input_batch.req_id_to_index
        self.scheduled = {
            row[request]: _scheduled(drafts[request], tokens, request)
            for request, tokens in scheduler_output.scheduled_spec_decode_tokens.items()
        }
        self.judged = self.scheduled | {
            row[request]: draft
            for request, draft in drafts.items()
            if draft is not None and has_grammar(self.requests[request].sampling_params)
        }
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
        drafts = self.drafter._draft_attn_layer_names
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
        with self._only_seeds_that_count():
            output = super().sample_tokens(grammar_output)
        step, self.step = self.step, None
        self.scheduled, self.judged, self.initial = {}, {}, None
        if sampling and step is not None:
            counts = (0.0, 0.0) if self.budget is None else self.budget.budget.take()
            output.cudagraph_stats = step_figures(
                self.clock.take(), chain.from_iterable(step.depths.values()), *counts, dead=self.dead
            )
            self.dead = 0
        if self.profile is not None:
            self.profile.tick()
        return output

    @contextmanager
    def _only_seeds_that_count(self) -> Iterator[None]:
        """Hide the generators of prompts that go on in the next step: what they draw is thrown away, and vLLM would
        wind them back by an offset, which the generators of a CPU do not have."""
        generators = self.input_batch.generators
        hidden = {row: generators.pop(row) for row in list(generators) if self.discard_request_mask.np[row]}
        try:
            yield
        finally:
            generators.update(hidden)

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
            if self.initial is not None:
                tokens = tokens.masked_fill(held(tokens), -1)
        with self.clock.phase("commit"):
            commit(step, nodes, self.compilation_config.static_forward_context)
        if self.budget is not None:
            self.budget.verified(self.judged, tokens, nodes)
        if self.recorder is not None:
            self.recorder.see(self.scheduled, [self.requests[name] for name in self.input_batch.req_ids], nodes, target)
        return SamplerOutput(sampled_token_ids=tokens.int(), logprobs_tensors=logprobs)

    def _limits(self, step: Verification) -> list[int]:
        """Stop at the token that reaches `min_tokens`: the sampler lifts its ban on stop tokens between steps only."""
        states = [self.requests[request] for request in self.input_batch.req_ids]
        missing = [state.sampling_params.min_tokens - len(state.output_token_ids) for state in states]
        return [tokens if tokens > 0 else step.levels + 1 for tokens in missing]

    def _requests(self, step: Verification) -> Requests:
        sampling = [self.requests[request].sampling_params for request in self.input_batch.req_ids]
        return Requests(
            own=torch.tensor([draws_from_target(one, self.pair, self.options) for one in sampling]),
            greedy=torch.tensor([is_greedy(one) for one in sampling]),
            seed=self._seeds(self.input_batch.req_ids),
            position=torch.tensor(step.computed),
        )

    def _seeds(self, requests: Any) -> Tensor:
        """A request's own seed, or one given at its first step."""
        for request in requests:
            if request not in self.seeds:
                own = self.requests[request].sampling_params.seed
                self.seeds[request] = int(self.random.integers(1 << 62)) if own is None else own
        return torch.tensor([self.seeds[request] for request in requests])

    # -- draft: catch up, grow

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return common_attn_metadata is not None  # limits are per request; vLLM's test would stop the whole batch

    def propose_draft_token_ids(
        self, scheduler_output: SchedulerOutput, sampled_token_ids: list[list[int]], *rest: Any
    ) -> list[list[int]]:
        requests = self.input_batch.req_ids
        room = self.scheduler_config.max_num_batched_tokens
        nodes = nodes_per_request(running=len(requests), nodes=self.num_spec_tokens, room=room)
        greedy = [is_greedy(self.requests[name].sampling_params) for name in requests]
        drafting = self.budget is None or self.budget.drafts(greedy)
        with self.clock.phase("draft"):
            news = [
                item
                for row in range(len(requests))
                if (item := self._catch_up(row, scheduler_output, bool(sampled_token_ids[row]), nodes))
            ]
            items = self._without_gaps(news, room + len(news), drafting)  # each may have its new root
            rows, state = self.drafter.catch_up(items)
        if state is None:
            self._end_step()
            return [[] for _ in requests]
        state.keys.sliced = self.proposer.mask(nodes)
        rooted = [item for item in items if item.rooted]
        others = sum(item.rooted for item in news) - len(rooted)
        names = [requests[item.row] for item in rooted]
        sampling = [self.requests[name].sampling_params for name in names]
        wanted = [0.0 if is_greedy(one) else one.temperature for one in sampling]
        fitted = GREEDY_DRAFT_TEMPERATURE if self.budget is None else self.budget.greedy_temperature
        temperature = torch.tensor([self.options.tree.temperature(one, fitted) for one in wanted])
        position = torch.tensor([item.start + len(item.tokens) - 1 for item in rooted])
        request = Request(
            temperature=temperature,
            greedy=torch.tensor([is_greedy(one) for one in sampling]),
            rng=CounterRNG(self._seeds(names), position, purpose=0),
            initial=None if self.initial is None else self.initial[[item.row for item in rooted]],
        )
        levels, dead = list[Tensor](), list[Tensor]()
        hidden: list[Any] = [rows.hidden] if self.recorder is not None and self.recorder.reads_hidden else []
        drafter = TimedDrafter(self.drafter, self.clock, hidden)
        with self.clock.phase("tree"):
            proposal = draft_tree(
                self.proposer,
                drafter,
                rows,
                state,
                nodes=nodes,
                request=request,
                agree=agree if self.budget is None else self.budget.agreed(agree, len(rooted), others),
                keep=levels.append if self.recorder or self.pair.rule is not RULES["target_only"] else lambda _: None,
                lost=dead.append,
            )
            self.dead += int(torch.cat(dead, 1).sum())
            proposal = proposal_from_rank_0(proposal)
            drafts = to_drafts(proposal, levels, temperature, request.initial, hidden)
            if self.budget is None or not self.budget.limited:
                self.steering.grown(sum(len(draft.tree) for draft in drafts), nodes * len(drafts))
            grammar = [has_grammar(one) for one in sampling]
            if any(grammar):
                tree = proposal.tree.first_paths(torch.tensor(grammar), self.proposer.max_depth)
                proposal = proposal._replace(tree=tree)
                drafts = [one.first_path() if alone else one for one, alone in zip(drafts, grammar, strict=True)]
        with self.clock.phase("tree"):  # once more: the budget reads what the trees have cost
            if self.budget is not None:
                roots = [logits if one == 0 else None for one, logits in zip(wanted, rows.logits[:, 0], strict=True)]
                prompts = self.input_batch.num_prompt_tokens
                reading = any(one.start < prompts[one.row] for one in news)
                drafts = self.budget.cut(
                    drafts, proposal, roots, drafter.levels, others=others, prompts=reading, gaps=items != news
                )
            self.drafts.update(zip(names, drafts, strict=True))
        self._end_step()
        return [list(self.drafts[name].tree.tokens) if name in self.drafts else [] for name in requests]

    def _end_step(self) -> None:
        if self.budget is not None and self.step is not None:
            self.budget.end_step(self.step)

    def _catch_up(self, row: int, scheduler_output: SchedulerOutput, sampled: bool, nodes: int) -> CatchUp | None:
        """What the draft has to read of one request, from the first token of this step on."""
        request = self.input_batch.req_ids[row]
        state = self.requests[request]
        start = int(self.input_batch.num_computed_tokens_cpu[row])
        end = start + scheduler_output.num_scheduled_tokens[request]
        if sampled:
            end = int(self.input_batch.num_tokens_no_spec[row])
        limit = self.effective_drafter_max_model_len
        max_tokens = state.sampling_params.max_tokens
        finishing = max_tokens is not None and max_tokens - len(state.output_token_ids) <= 1
        rooted = sampled and nodes > 0 and not finishing and end < min(limit, self.max_model_len)
        end = min(end if rooted or not sampled else end - 1, limit)
        if end <= start:
            return None
        return CatchUp(row, start, self.input_batch.token_ids_cpu[row, start:end].tolist(), rooted)

    def _without_gaps(self, news: list[CatchUp], room: int, drafting: bool) -> list[CatchUp]:
        """Of a step that is `drafting`, from where the draft has read to, and no more than `room` tokens."""
        blocks = self.drafter._block_table().block_table.np
        items = []
        for item in news:
            table, end = blocks[item.row], item.start + len(item.tokens)
            start = self.coverage.reach(table, item.start)
            self.coverage.skipped(table, item.start, end)
            if not drafting:
                continue
            if start < item.start or end - start > room:
                read = self.input_batch.token_ids_cpu[item.row, start : min(end, start + room)].tolist()
                item = CatchUp(item.row, start, read, item.rooted and len(read) == end - start)
            room -= len(item.tokens)
            if item.tokens:
                items.append(item)
                self.coverage.read(table, start, start + len(item.tokens) - item.rooted)
        return items


def _all_processors(vllm_config: Any, *args: Any) -> Any:
    """The processors of plain decoding, min_p and logit_bias among them; vLLM drops those beside speculation."""
    plain = copy.copy(vllm_config)
    plain.speculative_config = None
    return build_logitsprocs(plain, *args)


def _scheduled(draft: Draft | None, tokens: list[int], request: str) -> Draft:
    """The draft of the tokens that the scheduler kept: a prefix of what was drafted."""
    if draft is not None and draft.tree.tokens[: len(tokens)] == tuple(tokens):
        return draft.prefix(len(tokens))
    raise RuntimeError(f"request {request}: scheduled draft tokens {tokens} are not those of its tree {draft}")
