"""Drafting trees on Model Runner V2 with any kind of draft: a mixin over vLLM's speculators."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.budget.planner import ALL
from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.drafters.lookup import Reading
from vllm_adaptive_tree.engine.v2.drafts import Drafts
from vllm_adaptive_tree.engine.v2.kernel_dispatch import counter_rng
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
from vllm_adaptive_tree.engine.v2.texts import texts
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.methods import offering
from vllm_adaptive_tree.proposers import Proposal, Request, draft_tree
from vllm_adaptive_tree.proposers.merging import draft_levels, merge
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY

LEVEL_ROWS = 256
"""Rows of a draft level of the whole batch that cost a GPU hardly more than one: it is bound by the draft's weights."""
FEWEST_COLUMNS = 4


def level_width(requests: int, nodes: int, rows: int) -> int:
    """Columns that a draft level reads of each of `requests` trees of `nodes` nodes; `rows`: the most that any forward
    may have (`max_num_batched_tokens`).

    Lossless for every rule: the width follows from the number of requests alone, before anything is sampled, and a node
    whose column is trimmed counts as never read, so a rule takes the target's own distribution after it. Which nodes
    stay is decided by their order, which the proposer fixes before their children are drawn.
    """
    return max(1, min(nodes, max(LEVEL_ROWS // requests, FEWEST_COLUMNS), rows // requests))


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
    grows: Tensor | None = None  # [R] bool: which requests get a tree; None: all


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
        self.stats, self.record = runner.stats, runner.record
        self.random = self.options.tree.temperature(2.0)  # the draft's, if it does not follow the request's own
        self.follows = self.random != self.options.tree.temperature(3.0)
        self.device, self.num_speculative_steps = runner.device, self.options.num_speculative_tokens
        self.most_rows = runner.vllm_config.scheduler_config.max_num_batched_tokens
        self.drafts = Drafts(runner.max_num_reqs, self.num_speculative_steps, self.device)
        self.missed = self.forwards = 0
        vocabulary, lookup, text = (
            runner.vllm_config.model_config.get_vocab_size(),
            self.options.lookup,
            self.options.text,
        )
        self.lookup = None if lookup is None else lookup.build(vocabulary)
        self.text = None if text is None else text.build(vocabulary)
        self.offers = self.lookup or offering(self.text, self.pair)
        """What proposes trees while the draft rests."""
        nodes = self.num_speculative_steps
        self.drafted_levels = self.levels = min(self.pair.proposer.max_depth, nodes)
        """The largest depth of what is drafted; of a tree."""
        if self.offers is not None:
            self.levels = min(max(self.levels, self.offers.length or nodes), nodes)
        self.dead: Tensor | None = None  # number of dead rows of the last trees, until the metrics take it

    def width(self, requests: int) -> int:
        """Columns of a level in a batch of so many requests."""
        return level_width(requests, self.num_speculative_steps, self.most_rows)

    @property
    def keeps_levels(self) -> bool:
        """Whether a rule reads the draft's distributions."""
        return self.pair.rule is not RULES["target_only"]

    @abstractmethod
    def roots(self, target: TargetOutput) -> Roots:
        """Read the tokens that this step has accepted, and begin a tree after each request."""

    @abstractmethod
    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        """As in `drafters.Drafter`."""

    @abstractmethod
    def rest(self, target: TargetOutput) -> None:
        """The draft rests in this step."""

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
        with self.stats.times.phase("draft"):
            return self._proposed(target, temperature[request], seeds[request], nothing)

    def _proposed(self, target: TargetOutput, temperature: Tensor, seed: Tensor, nothing: Tensor) -> Tensor:
        """Tokens of the trees [R, N] of a step of R requests, with `temperature` and `seed` [R]."""
        input_batch = target.batch
        self.readback.next_step()
        self.missed = 0
        greedy = self.flags.greedy[input_batch.idx_mapping_np]
        most = ALL if self.budget is None else self.budget.begin_step(greedy)
        trees = most > 0 or self.offers is not None
        self.drafts.forget()
        tokens = nothing
        if most == 0:
            self.rest(target)
        if trees:
            tree, level = self._trees(target, temperature, seed, most)
            self.stats.drafted(input_batch.req_ids, tree, rests=most == 0)
            if self.record is not None:
                self.record.drafted(input_batch.req_ids, tree)
            if self.budget is not None:
                self.budget.drafted(tree, greedy, level)
            tokens = tree.tokens
        if self.budget is not None:
            context = int(input_batch.num_computed_tokens_np.sum())
            usual = not input_batch.has_prefill and not self.missed
            rows = input_batch.num_tokens
            self.budget.end_step(input_batch.num_reqs, rows, context, self.forwards, usual=usual, trees=trees)
        return tokens

    def _trees(
        self, target: TargetOutput, temperature: Tensor, seed: Tensor, most: int
    ) -> tuple[TreeBatch, Tensor | None]:
        """One tree for each of R requests, with at most `most` drafted levels, and how many of those each node needs
        [R, N] if there is a look-up; `temperature`, `seed` [R]."""
        batch, levels = target.batch, list[Tensor]()
        greedy = temperature == 0
        fitted = GREEDY_DRAFT_TEMPERATURE if self.budget is None else self.budget.greedy_temperature
        certain = self.options.tree.temperature(0.0, fitted)
        shaping = torch.where(greedy, certain, temperature if self.follows else self.random)
        sharpens = self.budget is not None and self.budget.temperature is not None
        self.forwards, found, logits = 0, None, None
        proposal = Proposal.nothing(batch.num_reqs, self.num_speculative_steps, self.device)
        if most:
            roots = self.roots(target)
            if self.budget is not None:
                self.budget.steer(batch.num_reqs, batch.num_reqs)
            request = Request(shaping, greedy, counter_rng(seed, roots.position, purpose=0))
            proposal, position = self._drafted(target, roots, request, most, levels), roots.position
            logits = roots.rows.logits[:, 0] if sharpens else None
            if self.offers is not None and isinstance(roots.state, Reading):  # the draft is a look-up
                found = roots.state.found
        if self.offers is not None and (self.lookup is not None or not most):
            text = texts(batch, self.states)
            position = position if most else text.length - 1
            found = self.offers.continuations(text)
            proposal = merge(proposal, found, nodes=self.num_speculative_steps, max_depth=self.pair.proposer.max_depth)
        proposal = proposal.padded(self.num_speculative_steps)
        self.drafts.store(batch.idx_mapping, position, proposal, levels, shaping, logits)
        return proposal.tree, None if found is None else draft_levels(proposal.tree, found)

    def _drafted(
        self, target: TargetOutput, roots: Roots, request: Request, most: int, levels: list[Tensor]
    ) -> Proposal:
        """As `_trees`; `levels` gets the logits of every level, if a rule reads them."""
        dead = list[Tensor]()
        width, deepest = self.width(target.batch.num_reqs), min(most, self.drafted_levels)

        def agree(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
            return Frontier(frontier.tokens[:, :width], frontier.parent[:, :width]), 1 + self.forwards < deepest

        proposal = draft_tree(
            self.pair.proposer,
            self,
            roots.rows,
            roots.state,
            nodes=self.num_speculative_steps,
            request=request,
            agree=agree,
            keep=levels.append if self.keeps_levels else lambda _: None,
            lost=dead.append,
        )
        self.dead = torch.cat(dead, 1).sum()
        if self.steering.steered.fill and 1 + self.forwards < most:  # else the limit may have stopped them
            rooted = target.num_sampled[: target.batch.num_reqs] > 0
            rooted = rooted if roots.grows is None else rooted & roots.grows
            sizes = proposal.tree.valid.sum(1).masked_fill(~rooted, 0)
            self.readback.send(torch.stack([sizes.sum(), rooted.sum()]), self._grown)
        if roots.grows is not None:
            proposal = proposal._replace(tree=proposal.tree.cut(self.num_speculative_steps * roots.grows))
        return proposal

    def _grown(self, counts: Tensor) -> None:
        nodes, trees = counts.tolist()
        self.steering.grown(nodes, trees * self.num_speculative_steps)
