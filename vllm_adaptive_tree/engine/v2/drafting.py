"""Drafting trees on Model Runner V2 with any kind of draft: a mixin over vLLM's speculators."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.budget.planner import ALL
from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.engine.v2.drafts import Drafts
from vllm_adaptive_tree.engine.v2.kernel_dispatch import counter_rng
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
from vllm_adaptive_tree.engine.v2.texts import texts
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.proposers import Request, draft_tree
from vllm_adaptive_tree.proposers.merging import merge
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY


class TargetOutput(NamedTuple):
    """What the target has read and sampled in a step of R requests, as vLLM passes it to a speculator."""

    batch: Any  # vLLM's InputBatch
    metadata: Any  # of the attention layers, by name
    slots: Any  # [rows] of the cache, by the name of the layer
    hidden: Tensor  # [rows, H]: last hidden states
    auxiliary: list[Tensor] | None  # [rows, H] each
    num_sampled: Tensor  # [R], 0 in the middle of a prompt
    num_rejected: Tensor  # [R]
    last_sampled: Tensor  # by vLLM's index of the request
    next_prompt_tokens: Tensor  # by the same index


class Roots(NamedTuple):
    """Where R trees begin."""

    rows: Rows  # W = 1
    position: Tensor  # [R] as the target counts
    state: Any  # for `grow`


class TreeDrafting(BaseSpeculator):
    """Comes before one of vLLM's speculators among the bases of a class. That class is a kind of draft, and defines how
    it reads accepted tokens and grows.
    """

    draft_attn_layer_names: Any = frozenset[str]()
    """Its attention layers; their K/V is in vLLM's paged cache."""
    hidden_size: int | None = None
    """Of its `Rows.hidden`."""
    reads_late = False
    """Whether it reads nothing in a step that drafts nothing, and needs a `DraftBacklog` to read that later."""
    forwards: int
    """Draft forwards after the roots', for the last trees; `grow` counts them."""
    late: np.ndarray | None
    """[R] bool: which requests still lack tokens in this step; None if none does."""
    missed: int
    """Tokens of earlier steps that it has read in this step."""
    backlog: Any = None
    """Of a draft that `reads_late`, if a budget may skip drafting."""
    off = False
    """Nothing is read or drafted any more."""

    def __init__(self, runner: Any, states: Any):
        """After vLLM's part of the class has been initialized. `states`: vLLM's RequestState."""
        self.states = states
        self.options, self.pair, self.flags = runner.options, runner.pair, runner.flags
        self.budget, self.steering, self.readback = runner.budget, runner.steering, AsyncReadback()
        self.random = self.options.tree.temperature(2.0)  # the draft's, if it does not follow the request's own
        self.follows = self.random != self.options.tree.temperature(3.0)
        self.device, self.num_speculative_steps = runner.device, self.options.num_speculative_tokens
        self.drafts = Drafts(runner.max_num_reqs, self.num_speculative_steps, self.device)
        self.late, self.missed, self.forwards = None, 0, 0
        lookup, nodes = self.options.lookup, self.num_speculative_steps
        self.levels = nodes if lookup else min(self.pair.proposer.max_depth, nodes)
        """The largest depth of a tree."""
        self.lookup = None if lookup is None else lookup.build(runner.vllm_config.model_config.get_vocab_size())
        self.dead: Tensor | None = None  # number of dead rows of the last trees, until the metrics take it

    @abstractmethod
    def roots(self, target: TargetOutput) -> Roots:
        """Read the tokens that this step has accepted, and begin a tree after each request."""

    @abstractmethod
    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        """As in `drafters.Drafter`."""

    @abstractmethod
    def rest(self, target: TargetOutput) -> None:
        """This step drafts nothing."""

    @abstractmethod
    def dummy_run(self, target: TargetOutput, *, without_attention: bool) -> None:
        """vLLM measures memory, or warms up."""

    @abstractmethod
    def measure(self, rows: int) -> Callable[[], Any]:
        """What one level of so many nodes runs, to be timed."""

    def verified(self, step: Verification, nodes: Tensor, batch: Any) -> None:
        """The target has accepted `nodes` [R, L] of the trees of `step`, before `roots` or `rest`."""

    def forget(self, request: str) -> None:
        """It has ended, is preempted, or comes again with more input."""
        if self.lookup is not None:
            self.lookup.forget([request])

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """A level has as many rows as its trees are wide: no graph fits."""

    def capture(self) -> None:
        """As above."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        *rest: Any,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        **_: Any,
    ) -> Tensor:
        target = TargetOutput(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens,
        )
        request = input_batch.idx_mapping
        nothing = torch.full((input_batch.num_reqs, self.num_speculative_steps), EMPTY, device=self.device)
        if self.off:
            return nothing
        if dummy_run:
            self.dummy_run(target, without_attention=skip_attn_for_dummy_run)
            return nothing
        self.readback.next_step()
        self.late, self.missed = None, 0
        greedy = self.flags.greedy[input_batch.idx_mapping_np]
        most = ALL if self.budget is None else self.budget.begin_step(greedy)
        if most == 0:
            self.rest(target)
            self.drafts.forget()
            tokens = nothing
        else:
            roots = self.roots(target)
            if self.budget is not None:
                self.budget.steer(input_batch.num_reqs, input_batch.num_reqs)
            tree = self._trees(input_batch, roots, temperature[request], seeds[request], num_sampled, most)
            if self.budget is not None:
                self.budget.drafted(tree, greedy)
            tokens = tree.tokens
        if self.budget is not None:
            context = int(input_batch.num_computed_tokens_np.sum())
            usual = not input_batch.has_prefill and not self.missed
            self.budget.end_step(input_batch.num_reqs, input_batch.num_tokens, context, self.forwards, usual=usual)
        return tokens

    def _trees(
        self, batch: Any, roots: Roots, temperature: Tensor, seed: Tensor, sampled: Tensor, most: int
    ) -> TreeBatch:
        """One tree for each of R requests, at most `most` levels deep; `temperature`, `seed` [R]; `sampled` [R]: how
        many tokens each emitted, 0 in the middle of a prompt."""
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
            roots.rows,
            roots.state,
            nodes=self.num_speculative_steps,
            request=Request(shaping, greedy, counter_rng(seed, roots.position, purpose=0)),
            agree=agree,
            keep=levels.append if self.pair.rule is not RULES["target_only"] else lambda _: None,
            lost=dead.append,
        )
        self.dead = torch.cat(dead, 1).sum()
        if self.steering.steered.fill and 1 + self.forwards < most:  # else the limit may have stopped them
            rooted = sampled[: batch.num_reqs] > 0
            sizes = proposal.tree.valid.sum(1).masked_fill(~rooted, 0)
            self.readback.send(torch.stack([sizes.sum(), rooted.sum()]), self._grown)
        if self.lookup is not None:
            _, found = self.lookup.begin(texts(batch, self.states))
            proposal = merge(proposal, found, nodes=self.num_speculative_steps, max_depth=self.pair.proposer.max_depth)
        proposal = proposal.padded(self.num_speculative_steps)
        if self.late is not None:
            limit = async_tensor_h2d(np.where(self.late, 0, self.num_speculative_steps), device=self.device)
            proposal = proposal._replace(tree=proposal.tree.cut(limit))
        grammar = self.flags.grammar[batch.idx_mapping_np]
        if grammar.any():
            chains = async_tensor_h2d(grammar, device=self.device)
            proposal = proposal._replace(tree=proposal.tree.first_paths(chains, self.levels))
        sharpens = self.budget is not None and self.budget.temperature is not None
        logits = roots.rows.logits[:, 0] if sharpens else None
        self.drafts.store(batch.idx_mapping, roots.position, proposal, levels, shaping, logits)
        return proposal.tree

    def _grown(self, counts: Tensor) -> None:
        nodes, trees = counts.tolist()
        self.steering.grown(nodes, trees * self.num_speculative_steps)
