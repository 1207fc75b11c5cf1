"""Drafting trees with an independent draft model: vLLM's own first forward, then level by level."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.engine.common.attention import DraftKeys, TreeRows
from vllm_adaptive_tree.engine.common.contexts import PagedContexts
from vllm_adaptive_tree.engine.common.steering import Steering
from vllm_adaptive_tree.engine.v2.budget import ALL, BatchBudget
from vllm_adaptive_tree.engine.v2.drafts import Drafts
from vllm_adaptive_tree.engine.v2.fused import keyed_noise
from vllm_adaptive_tree.engine.v2.kinds import Kinds
from vllm_adaptive_tree.engine.v2.resting import RestingSpeculator
from vllm_adaptive_tree.engine.v2.returning import Returning
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.proposers import Request, draft_tree
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY


class TreeSpeculator(RestingSpeculator):
    """Satisfies `drafters.Drafter`. The draft's K/V of accepted tokens and of the root stand in the paged cache, the
    nodes' beside it."""

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        options: TreeOptions,
        pair: Pair,
        kinds: Kinds,
        budget: BatchBudget | None,
        steering: Steering,
        tokens: Tensor,
    ):
        super().__init__(vllm_config, device, tokens)
        self.options, self.pair, self.kinds, self.budget = options, pair, kinds, budget
        self.steering, self.returning = steering, Returning()
        self.by_place = pair.proposer.by_place
        self.random = options.tree.temperature(2.0)  # of the draft's law, if it does not follow the request's own
        self.follows = self.random != options.tree.temperature(3.0)
        self.drafts = Drafts(self.max_num_reqs, self.num_speculative_steps, device)
        self.longest = 0  # rows of a request in the first forward, at most
        self.forwards = 0  # of the draft behind the roots', for the last trees
        self.dead: Tensor | None = None  # rows of the last trees, until someone takes the figure

    def sample_draft(self, hidden_states: Tensor, *rest: Any, **_: Any) -> Tensor:
        """vLLM asks for the first token of a chain; what it says there is the law at the root."""
        logits = self.compute_draft_logits(hidden_states, 0)
        self.roots = Rows(logits[:, None], hidden_states[:, None])
        return logits.argmax(-1)

    def _build_attn_metadata(self, *args: Any, query_start_loc_np: np.ndarray, **kwargs: Any) -> Any:
        """Of a compacted step the host knows the sum of all rows alone, and backends ask it for the longest query."""
        if self.budget is not None:
            query_start_loc_np = query_start_loc_np.copy()
            query_start_loc_np[1:] = np.maximum(query_start_loc_np[1:], min(self.longest, query_start_loc_np[-1]))
        return super()._build_attn_metadata(*args, query_start_loc_np=query_start_loc_np, **kwargs)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        *rest: Any,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        dp_sync_state: Any = None,
        **_: Any,
    ) -> Tensor:
        count, request = input_batch.num_reqs, input_batch.idx_mapping
        without_attention = dummy_run and skip_attn_for_dummy_run
        self._copy_request_inputs(count, request, temperature, seeds)
        self.returning.next_step()
        self.longest = 1 + int(input_batch.num_scheduled_tokens.max())
        if dummy_run or self.budget is None:
            self._prefill(input_batch, num_rejected, last_sampled, count, without_attention, None)
            if dummy_run:
                return self.draft_tokens[:count]
            return self._trees(input_batch, temperature[request], seeds[request], num_sampled, ALL).tokens
        greedy = self.kinds.greedy[input_batch.idx_mapping_np]
        most, missed = self.budget.levels(greedy), 0
        if most == 0:
            self.rest(input_batch, np.ones(count, dtype=bool))
            self.drafts.forget()
            tokens = torch.full_like(self.draft_tokens[:count], EMPTY)
        else:
            missed = self.catch_up(input_batch)
            if self.budget.controller is not None:
                self.steering.price(self.budget.controller, count, count)
            self._prefill(input_batch, num_rejected, last_sampled, count, without_attention, None)
            tree = self._trees(input_batch, temperature[request], seeds[request], num_sampled, most)
            self.budget.drafted(tree, greedy, by_place=self.by_place)
            tokens = tree.tokens
        context = int(input_batch.num_computed_tokens_np.sum())
        usual = not input_batch.has_prefill and not missed
        self.budget.decide(count, input_batch.num_tokens, context, self.forwards, usual=usual, missed=missed)
        return tokens

    def _trees(self, batch: Any, temperature: Tensor, seed: Tensor, sampled: Tensor, most: int) -> TreeBatch:
        """One tree for each of R requests, at most so many levels deep; `temperature`, `seed` [R]; `sampled` [R]: how
        many tokens each emitted, none in the middle of a prompt."""
        root = self.expanded_positions[self.last_token_indices[: batch.num_reqs]]
        greedy = temperature == 0
        fitted = GREEDY_DRAFT_TEMPERATURE if self.budget is None else self.budget.greedy_temperature
        certain = self.options.tree.temperature(0.0, fitted)
        shaping = torch.where(greedy, certain, temperature if self.follows else self.random)
        levels, dead = list[Tensor](), list[Tensor]()
        self.forwards = 0

        def agree(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
            return frontier, 1 + self.forwards < most

        proposal = draft_tree(
            self.pair.proposer,
            self,
            self.roots,
            (self._keys(batch, root), root, torch.zeros_like(root)[:, None]),
            nodes=self.num_speculative_steps,
            request=Request(shaping, greedy, keyed_noise(seed, root, purpose=0)),
            agree=agree,
            keep=levels.append if self.pair.rule is not RULES["target_only"] else lambda _: None,
            lost=dead.append,
        ).padded(self.num_speculative_steps)
        self.dead = torch.cat(dead, 1).sum()
        if self.steering.steered.fill and 1 + self.forwards < most:  # else the limit may have stopped them
            rooted = sampled[: batch.num_reqs] > 0
            sizes = proposal.tree.valid.sum(1).masked_fill(~rooted, 0)
            self.returning.send(torch.stack([sizes.sum(), rooted.sum()]), self._grown)
        if self.late is not None:
            limit = async_tensor_h2d(np.where(self.late, 0, self.num_speculative_steps), device=self.device)
            proposal = proposal._replace(tree=proposal.tree.cut(limit))
        grammar = self.kinds.grammar[batch.idx_mapping_np]
        if grammar.any():
            chains = async_tensor_h2d(grammar, device=self.device)
            proposal = proposal._replace(tree=proposal.tree.first_paths(chains, self.pair.proposer.max_depth))
        sharpens = self.budget is not None and self.budget.sharpening is not None
        roots = self.roots.logits[:, 0] if sharpens else None
        self.drafts.store(batch.idx_mapping, root, proposal, levels, shaping, roots)
        return proposal.tree

    def _grown(self, figures: Tensor) -> None:
        nodes, trees = figures.tolist()
        self.steering.grown(nodes, trees * self.num_speculative_steps)

    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        """Read one level, `tokens` and `parent` [R, W] as in `Frontier`; unused columns cost their row too."""
        self.forwards += 1
        keys, root, depth = state
        new = depth.gather(1, parent) + 1
        places = torch.arange(tokens.numel(), device=self.device)
        keys.open_level(TreeRows(places, (tokens.shape[0], tokens.shape[1])), parent)
        positions = (root[:, None] + new).clamp(max=self.max_model_len - 1).flatten()
        metadata = dict.fromkeys(self.draft_attn_layer_names, keys)
        hidden = self._run_model(tokens.clamp(min=0).flatten().int(), positions, metadata, {}, None)
        logits = self.compute_draft_logits(hidden, 0).unflatten(0, tokens.shape)
        return Rows(logits, hidden.unflatten(0, tokens.shape)), (keys, root, torch.cat([depth, new], 1))

    def _keys(self, batch: Any, root: Tensor) -> DraftKeys:
        group = self.group
        block_size = self.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        longest = 1 + int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max())
        blocks = -(-min(longest, self.max_model_len) // block_size)
        table = self.block_tables.input_block_tables[group][: batch.num_reqs, :blocks]
        return DraftKeys(PagedContexts(table, block_size), root + 1)
