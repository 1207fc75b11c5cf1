"""The adapter to vLLM's V1 model runner on a CPU: the one file that walks requests on the host."""

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_adaptive_tree.acceptance import target_only
from vllm_adaptive_tree.engine import support
from vllm_adaptive_tree.engine.attention import TreeAttentionImpl
from vllm_adaptive_tree.engine.clock import PhaseClock
from vllm_adaptive_tree.engine.commit import commit
from vllm_adaptive_tree.engine.drafter import CatchUp, ModelDrafter
from vllm_adaptive_tree.engine.metrics import step_figures
from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.ranks import from_rank_0
from vllm_adaptive_tree.engine.share import nodes_per_request
from vllm_adaptive_tree.engine.target_draws import TargetDraws
from vllm_adaptive_tree.engine.translate import tree_options
from vllm_adaptive_tree.engine.verification import Verification
from vllm_adaptive_tree.proposers import Frontier, OptTree, draft_tree
from vllm_adaptive_tree.trees import TokenTree, TreeBatch

GREEDY_DRAFT_TEMPERATURE = 0.6


class TreeModelRunner(CPUModelRunner):
    def __init__(self, vllm_config: Any, device: torch.device):
        with (
            swapped(gpu_model_runner, "DraftModelProposer", ModelDrafter),
            swapped(gpu_model_runner, "build_logitsprocs", _all_processors),
        ):
            super().__init__(vllm_config, device)
        self.options = tree_options(vllm_config)
        # Draft after bookkeeping, from token lists; vLLM's padded drafting is for its own chains.
        self.speculative_config.disable_padded_drafter_batch = True
        tree = self.options.tree
        # "auto" is measured once the models are loaded; until then every level pays.
        self.proposer = OptTree(max_depth=tree.max_depth, threshold=0 if tree.threshold == "auto" else tree.threshold)
        self.trees: dict[str, TokenTree] = {}  # drafted, not yet scheduled
        self.step: Verification | None = None
        self.clock = PhaseClock()

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        for name, layer in self.compilation_config.static_forward_context.items():
            support.check_layer(name, layer)
            TreeAttentionImpl.adopt(layer)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        for name, layer in self.compilation_config.static_forward_context.items():
            support.check_packing(name, layer)

    # -- verify: the trees of this step, their positions, their mask

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        for request in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            self.trees.pop(request, None)
        trees = {}
        for request, tokens in scheduler_output.scheduled_spec_decode_tokens.items():
            trees[self.input_batch.req_id_to_index[request]] = _scheduled_tree(
                self.trees.pop(request, None), tokens, request
            )
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
            own = step.metadata(group.get_metadata_builder(0), layers, metadata[layers[0]])
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
        output = super().sample_tokens(grammar_output)
        step, self.step = self.step, None
        if sampling and step is not None:
            output.ec_connector_output = step_figures(self.clock, chain.from_iterable(step.depths.values()))
        return output

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        step = self.step
        assert step is not None
        with self.clock.phase("accept"):
            limits = [self._token_limit(request) for request in self.input_batch.req_ids]
            draws = TargetDraws(self.sampler, self.input_batch.sampling_metadata, logits, step, limits)
            accepted = target_only(step.batch(), draws, levels=step.levels, proceed=lambda active: bool(active.any()))
            logprobs = draws.close()
            missing = step.levels + 1 - accepted.tokens.shape[1]  # the walk may have ended early
            tokens, nodes = from_rank_0(torch.nn.functional.pad(torch.stack(accepted), (0, missing), value=-1))
            tokens = tokens[:, : int((tokens >= 0).any(0).sum())]
        with self.clock.phase("commit"):
            commit(step, nodes, self.compilation_config.static_forward_context)
        return SamplerOutput(sampled_token_ids=tokens.int(), logprobs_tensors=logprobs)

    def _token_limit(self, request: str) -> int | None:
        """Stop at the token that reaches `min_tokens`: the sampler lifts its ban on stop tokens between steps only."""
        state = self.requests[request]
        missing = state.sampling_params.min_tokens - len(state.output_token_ids)
        return missing if missing > 0 else None

    # -- draft: catch up, grow

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return common_attn_metadata is not None  # limits are per request; vLLM's test would stop the whole batch

    def propose_draft_token_ids(
        self, scheduler_output: SchedulerOutput, sampled_token_ids: list[list[int]], *rest: Any
    ) -> list[list[int]]:
        requests = self.input_batch.req_ids
        room = self.scheduler_config.max_num_batched_tokens
        nodes = nodes_per_request(running=len(requests), nodes=self.num_spec_tokens, room=room)
        with self.clock.phase("draft"):
            items = [
                item
                for row in range(len(requests))
                if (item := self._catch_up(row, scheduler_output, bool(sampled_token_ids[row]), nodes))
            ]
            logits, state = self.drafter.catch_up(items)
        if state is None:
            return [[] for _ in requests]
        rooted = [item.row for item in items if item.rooted]
        with self.clock.phase("tree"):
            batch = draft_tree(
                self.proposer,
                _Timed(self.drafter, self.clock),
                logits,
                state,
                nodes=nodes,
                temperature=torch.tensor([self._draft_temperature(requests[row]) for row in rooted]),
                agree=_agree,
            )
            for row, tree in zip(rooted, _to_host(batch), strict=True):
                structured = self.requests[requests[row]].sampling_params.structured_outputs is not None
                self.trees[requests[row]] = tree.first_path() if structured else tree
        return [list(self.trees[request].tokens) if request in self.trees else [] for request in requests]

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

    def _draft_temperature(self, request: str) -> float:
        temperature = self.options.tree.draft_temperature
        if temperature != "auto":
            return temperature
        own = self.requests[request].sampling_params.temperature
        return own if own >= 1e-5 else GREEDY_DRAFT_TEMPERATURE


class _Timed:
    """The drafter, its forwards counted as "draft" and taken off the surrounding "tree"."""

    def __init__(self, drafter: ModelDrafter, clock: PhaseClock):
        self.catch_up = drafter.catch_up
        self.drafter, self.clock = drafter, clock

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Tensor, Any]:
        before = self.clock.seconds["draft"]
        with self.clock.phase("draft"):
            result = self.drafter.grow(tokens, parent, state)
        self.clock.seconds["tree"] -= self.clock.seconds["draft"] - before
        return result


def _all_processors(vllm_config: Any, *args: Any) -> Any:
    """The processors of plain decoding, min_p and logit_bias among them; vLLM drops those beside speculation."""
    plain = copy.copy(vllm_config)
    plain.speculative_config = None
    return build_logitsprocs(plain, *args)


def _scheduled_tree(tree: TokenTree | None, tokens: list[int], request: str) -> TokenTree:
    """The tree of the tokens that the scheduler kept: a prefix of what was drafted."""
    if tree is not None and tree.tokens[: len(tokens)] == tuple(tokens):
        return tree.prefix(len(tokens))
    raise RuntimeError(f"request {request}: scheduled draft tokens {tokens} are not those of its tree {tree}")


def _agree(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
    """Every rank grows rank 0's frontier, cut down to the widest request; stop when no tree grows."""
    if get_tp_group().world_size > 1:
        tokens, parent = from_rank_0(torch.stack(frontier))
        frontier = Frontier(tokens, parent)
    used = frontier.tokens >= 0
    width = int(used.sum(1).max())
    return Frontier(frontier.tokens[:, :width], frontier.parent[:, :width]), width > 0


def _to_host(batch: TreeBatch) -> list[TokenTree]:
    tokens, parents = from_rank_0(torch.stack([batch.tokens, batch.parent]))
    counts = (tokens >= 0).sum(1).tolist()
    return [
        TokenTree(tuple(token[:count]), tuple(parent[:count]))
        for token, parent, count in zip(tokens.tolist(), parents.tolist(), counts, strict=True)
    ]
