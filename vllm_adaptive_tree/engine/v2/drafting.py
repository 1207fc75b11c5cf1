"""Drafting trees on Model Runner V2 with any kind of draft: a mixin over vLLM's speculators."""

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.budget.planner import ALL
from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.engine.v2.drafts import Drafts
from vllm_adaptive_tree.engine.v2.kernel_dispatch import counter_rng
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
from vllm_adaptive_tree.proposers import Request, draft_tree
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY


class TreeDrafting(DraftModelSpeculator):
    """Comes before one of vLLM's speculators among the bases of a class. That class defines how its kind of draft reads
    accepted tokens, begins and grows, and how it catches up after skipped steps.
    """

    forwards: int
    """Draft forwards after the roots', for the last trees; `grow` counts them."""
    late: np.ndarray | None = None
    """[R] bool: which requests still lack tokens in this step; None if none does."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any):
        super().__init__(vllm_config, device)
        self.options, self.pair, self.flags = runner.options, runner.pair, runner.flags
        self.budget, self.steering, self.readback = runner.budget, runner.steering, AsyncReadback()
        self.random = self.options.tree.temperature(2.0)  # the draft's, if it does not follow the request's own
        self.follows = self.random != self.options.tree.temperature(3.0)
        self.drafts = Drafts(self.max_num_reqs, self.num_speculative_steps, device)
        self.forwards = 0
        self.dead: Tensor | None = None  # number of dead rows of the last trees, until the metrics take it

    @abstractmethod
    def read(self, batch: Any, num_rejected: Tensor, last_sampled: Tensor, *, without_attention: bool) -> Rows:
        """One forward over the tokens that this step has accepted; the rows of the roots (W = 1)."""

    @abstractmethod
    def begin(self, batch: Any) -> tuple[Tensor, Any]:
        """The position of each root [R], as the target counts, and the state of R trees."""

    @abstractmethod
    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        """As in `drafters.Drafter`."""

    def skip(self, batch: Any, which: np.ndarray) -> None:
        """The draft does not read this step of the requests `which` [R] bool."""

    def catch_up(self, batch: Any) -> int:
        """Read the skipped tokens of this batch; returns how many."""
        return 0

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
        self.readback.next_step()
        if dummy_run or self.budget is None:
            rows = self.read(input_batch, num_rejected, last_sampled, without_attention=without_attention)
            if dummy_run:
                return self.draft_tokens[:count]
            return self._trees(input_batch, rows, temperature[request], seeds[request], num_sampled, ALL).tokens
        greedy = self.flags.greedy[input_batch.idx_mapping_np]
        most, missed = self.budget.begin_step(greedy), 0
        if most == 0:
            self.skip(input_batch, np.ones(count, dtype=bool))
            self.drafts.forget()
            tokens = torch.full_like(self.draft_tokens[:count], EMPTY)
        else:
            missed = self.catch_up(input_batch)
            self.budget.steer(count, count)
            rows = self.read(input_batch, num_rejected, last_sampled, without_attention=without_attention)
            tree = self._trees(input_batch, rows, temperature[request], seeds[request], num_sampled, most)
            self.budget.drafted(tree, greedy)
            tokens = tree.tokens
        context = int(input_batch.num_computed_tokens_np.sum())
        usual = not input_batch.has_prefill and not missed
        self.budget.end_step(count, input_batch.num_tokens, context, self.forwards, usual=usual)
        return tokens

    def _trees(
        self, batch: Any, rows: Rows, temperature: Tensor, seed: Tensor, sampled: Tensor, most: int
    ) -> TreeBatch:
        """One tree for each of R requests from the `rows` of their roots, at most `most` levels deep; `temperature`,
        `seed` [R]; `sampled` [R]: how many tokens each emitted, 0 in the middle of a prompt."""
        root, state = self.begin(batch)
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
            rows,
            state,
            nodes=self.num_speculative_steps,
            request=Request(shaping, greedy, counter_rng(seed, root, purpose=0)),
            agree=agree,
            keep=levels.append if self.pair.rule is not RULES["target_only"] else lambda _: None,
            lost=dead.append,
        ).padded(self.num_speculative_steps)
        self.dead = torch.cat(dead, 1).sum()
        if self.steering.steered.fill and 1 + self.forwards < most:  # else the limit may have stopped them
            rooted = sampled[: batch.num_reqs] > 0
            sizes = proposal.tree.valid.sum(1).masked_fill(~rooted, 0)
            self.readback.send(torch.stack([sizes.sum(), rooted.sum()]), self._grown)
        if self.late is not None:
            limit = async_tensor_h2d(np.where(self.late, 0, self.num_speculative_steps), device=self.device)
            proposal = proposal._replace(tree=proposal.tree.cut(limit))
        grammar = self.flags.grammar[batch.idx_mapping_np]
        if grammar.any():
            chains = async_tensor_h2d(grammar, device=self.device)
            proposal = proposal._replace(tree=proposal.tree.first_paths(chains, self.pair.proposer.max_depth))
        sharpens = self.budget is not None and self.budget.temperature is not None
        roots = rows.logits[:, 0] if sharpens else None
        self.drafts.store(batch.idx_mapping, root, proposal, levels, shaping, roots)
        return proposal.tree

    def _grown(self, counts: Tensor) -> None:
        nodes, trees = counts.tolist()
        self.steering.grown(nodes, trees * self.num_speculative_steps)
