"""Drafting trees on Model Runner V2 with any kind of draft: a mixin over vLLM's speculators."""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_adaptive_tree.acceptance import RULES, Accepted
from vllm_adaptive_tree.budget.planner import ALL
from vllm_adaptive_tree.drafters import Continuations, Frontier, Rows
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.drafts import Drafts
from vllm_adaptive_tree.engine.v2.graphs import DraftGraphs, Piece, ladder
from vllm_adaptive_tree.engine.v2.kernel_dispatch import counter_rng
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
from vllm_adaptive_tree.engine.v2.texts import texts
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.kernels.reading import Cache, DraftInputs, Shaping, Step
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


class Grown(NamedTuple):
    """What drafting leaves of R requests."""

    proposal: Proposal
    counts: Tensor  # [2]: nodes, and trees that had to grow
    dead: Tensor  # []: rows without a distribution that should have had one
    forwards: int


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
    forwards = 0
    """Draft forwards after the roots', for the last trees; `grow` counts them."""
    limit = 1 << 62
    """Tokens that it can read; a request with more of them goes on without drafts."""
    shift = 0
    """1: a row that it reads has the token behind its position."""
    reading_width = 0
    """Rows of a request that it reads at once, at most, where no prompt is; 0: it reads by itself."""
    graphs: DraftGraphs
    missed: int
    """Tokens of earlier steps that it has read in this step."""
    backlog: Any = None
    """Of a draft that `reads_late`, if a budget may skip drafting."""
    off = False
    """Nothing is read or drafted any more."""

    def __init__(self, runner: Any, states: Any):
        """After vLLM's part of the class has been initialized. `states`: vLLM's RequestState."""
        self.states, self.vllm_config = states, runner.vllm_config
        self.options, self.pair, self.flags = runner.options, runner.pair, runner.flags
        self.budget, self.steering, self.readback = runner.budget, runner.steering, AsyncReadback()
        self.stats, self.record = runner.stats, runner.record
        self.random = self.options.tree.temperature(2.0)  # the draft's, if it does not follow the request's own
        self.follows = self.random != self.options.tree.temperature(3.0)
        self.device, self.num_speculative_steps = runner.device, self.options.num_speculative_tokens
        if self.pair.proposer.gate is not None:
            self.pair.proposer.gate.to(self.device)
        self.most_rows = self.vllm_config.scheduler_config.max_num_batched_tokens
        self.drafts = Drafts(runner.max_num_reqs, self.num_speculative_steps, self.device)
        self.missed = 0
        vocabulary, lookup, text = (
            self.vllm_config.model_config.get_vocab_size(),
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
        self.captures = compiles(self.device) and self.pair.proposer.capturable
        """Whether graphs may hold its pieces."""
        self.inputs = DraftInputs.empty(runner.max_num_reqs, self.reading_width, self.device)
        self.everyone = torch.ones(runner.max_num_reqs, dtype=torch.int8, device=self.device)
        self.accepted: tuple[Verification, Accepted] | None = None
        """Of this step, until the draft reads it."""
        self.dead: Tensor | None = None  # number of dead rows of the last trees, until the metrics take it

    def width(self, requests: int) -> int:
        """Columns of a level in a batch of so many requests."""
        return level_width(requests, self.num_speculative_steps, self.most_rows)

    @property
    def sizes(self) -> list[int]:
        """Numbers of requests that its pieces run for; a batch is padded to the next."""
        most = len(self.everyone)
        return ladder(most) if self.captures else list(range(1, 1 + most))

    def padded(self, requests: int) -> int:
        return next(size for size in self.sizes if size >= requests)

    @property
    def keeps_levels(self) -> bool:
        """Whether a rule reads the draft's distributions."""
        return self.pair.rule is not RULES["target_only"]

    @abstractmethod
    def read(self, target: TargetOutput) -> None:
        """Read the tokens that this step has accepted, up to the next roots."""

    @abstractmethod
    def roots(self, requests: int) -> tuple[Rows, Any]:
        """After `read`: the rows of the roots (W = 1) of so many requests, padding included, and the state of their
        trees."""

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

    def catch_up(self, batch: Any) -> np.ndarray | None:
        """Read what was skipped before this step. Returns which requests lack nothing now [R] bool; None: all."""
        return None

    def cache(self, requests: int) -> Cache | None:
        """Its K/V of the first requests of this step's batch."""
        return None

    def verified(self, step: Verification, accepted: Accepted) -> None:
        """The target has accepted paths of the trees of `step`, before `read` or `rest`."""
        self.accepted = step, accepted

    def forget(self, request: str) -> None:
        """It has ended, is preempted, or comes again with more input."""
        if self.lookup is not None:
            self.lookup.forget([request])

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """`cudagraph_mode`: of the engine; with any, whole graphs hold the pieces of drafting."""
        self.graphs = DraftGraphs(
            self.vllm_config, self.device, cudagraph_mode if self.captures else CUDAGraphMode.NONE
        )

    def capture(self) -> None:
        """When vLLM records graphs; no request is there."""
        self.inputs.clear()
        self.graphs.record(self.pieces())
        self.drafts.forget()

    def pieces(self) -> dict[Piece, Callable[[], Any]]:
        """All that a step may run, the largest first. Trees of fewer levels are there for a budget."""
        fewest = 1 if self.options.tree.budget == "auto" else self.drafted_levels
        return {
            Piece.of(size, levels): partial(self.trees, size, levels)
            for size in reversed(self.sizes)
            for levels in range(self.drafted_levels, fewest - 1, -1)
        }

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
        if self.off or dummy_run:
            if not self.off:
                self.dummy_run(target, without_attention=skip_attn_for_dummy_run)
            return self._nothing(input_batch)
        with self.stats.times.phase("draft"):
            return self._proposed(target, temperature, seeds)

    def _proposed(self, target: TargetOutput, temperature: Tensor, seeds: Tensor) -> Tensor:
        """Tokens of the trees [R, N] of a step of R requests. Temperatures and seeds are vLLM's, by its index."""
        input_batch = target.batch
        self.readback.next_step()
        self.missed = 0
        greedy = self.flags.greedy[input_batch.idx_mapping_np]
        most = ALL if self.budget is None else self.budget.begin_step(greedy)
        if self.budget is not None and most:
            self.budget.steer(input_batch.num_reqs, input_batch.num_reqs)
        self._prepare(target, temperature, seeds, self.catch_up(input_batch) if most else None)
        if most:
            self.read(target)
        else:
            self.rest(target)
        self.accepted = None
        trees = most > 0 or self.offers is not None
        if trees:
            tree, level = self._trees(target, most)
            self.stats.drafted(input_batch.req_ids, tree, rests=most == 0)
            if self.record is not None:
                self.record.drafted(input_batch.req_ids, tree)
            if self.budget is not None:
                self.budget.drafted(tree, greedy, level)
            tokens = tree.tokens
        else:
            self.drafts.forget()
            tokens = self._nothing(input_batch)
        if self.budget is not None:
            context = int(input_batch.num_computed_tokens_np.sum())
            usual = not input_batch.has_prefill and not self.missed
            rows = input_batch.num_tokens
            self.budget.end_step(input_batch.num_reqs, rows, context, self.forwards, usual=usual, trees=trees)
        return tokens

    def _nothing(self, batch: Any) -> Tensor:
        return torch.full((batch.num_reqs, self.num_speculative_steps), EMPTY, device=self.device)

    def _prepare(self, target: TargetOutput, temperature: Tensor, seeds: Tensor, ready: np.ndarray | None) -> None:
        """What the pieces of this step read: `inputs`. Temperatures and seeds are vLLM's, by its index."""
        batch, states, proposer = target.batch, self.states, self.pair.proposer
        fitted = GREEDY_DRAFT_TEMPERATURE if self.budget is None else self.budget.greedy_temperature
        self.inputs.update(
            Step(
                batch.idx_mapping,
                target.num_sampled,
                batch.query_start_loc,
                None if self.accepted is None else self.accepted[1].nodes,
                states.num_computed_tokens.gpu,
                temperature,
                seeds,
                states.all_token_ids.gpu,
            ),
            Shaping(
                self.options.tree.temperature(0.0, fitted),
                self.random,
                self.follows,
                proposer.threshold,
                proposer.floor,
            ),
            self.everyone if ready is None else async_tensor_h2d(ready.astype(np.int8), device=self.device),
            self.cache(batch.num_reqs),
            padded=self.padded(batch.num_reqs),
            limit=self.limit,
            shift=self.shift,
        )

    def _trees(self, target: TargetOutput, most: int) -> tuple[TreeBatch, Tensor | None]:
        """One tree for each of R requests, with at most `most` drafted levels, and how many of those each node needs
        [R, N] if there is a look-up."""
        batch, inputs = target.batch, self.inputs
        requests, found, changed = batch.num_reqs, None, not most
        self.forwards = 0
        if most:
            proposal = self._drafted(requests, most)
            found = self.found_by_draft
        else:
            proposal = Proposal.nothing(requests, self.num_speculative_steps, self.device)
            self.drafts.open(0, 0)
        if self.offers is not None and (self.lookup is not None or not most):
            text, changed = texts(batch, self.states), True
            found = self.offers.continuations(text)
            proposal = merge(proposal, found, nodes=self.num_speculative_steps, max_depth=self.pair.proposer.max_depth)
            proposal = proposal.padded(self.num_speculative_steps)
        if changed:
            self.drafts.store(batch.idx_mapping, inputs.position[:requests], proposal, inputs.temperature[:requests])
        return proposal.tree, None if found is None else draft_levels(proposal.tree, found)

    @property
    def found_by_draft(self) -> Continuations | None:
        """What a draft that is a look-up has found for the last trees."""
        return None

    def _drafted(self, requests: int, most: int) -> Proposal:
        """The trees of the draft itself, which are in `drafts` too."""
        padded, levels = self.padded(requests), min(most, self.drafted_levels)
        self._open(padded)
        grown = self.graphs.run(Piece.of(padded, levels), partial(self.trees, padded, levels))
        self.dead, self.forwards = grown.dead, grown.forwards
        if self.steering.steered.fill and 1 + self.forwards < most:  # else the limit may have stopped them
            self.readback.send(grown.counts, self._grown)
        tree, read, planned = grown.proposal
        return Proposal(TreeBatch(*(part[:requests] for part in tree)), read[:requests], planned[:requests])

    def _open(self, padded: int) -> None:
        levels = self.drafted_levels if self.keeps_levels else 1
        self.drafts.open(padded, 1 + (levels - 1) * self.width(padded))

    def trees(self, requests: int, levels: int) -> Grown:
        """Trees of at most so many levels of so many requests, padding included, from what `inputs` says; a piece."""
        inputs, width, dead, slots = self.inputs, self.width(requests), list[Tensor](), 0
        self._open(requests)
        self.forwards = 0

        def agree(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
            return Frontier(frontier.tokens[:, :width], frontier.parent[:, :width]), 1 + self.forwards < levels

        def keep(logits: Tensor) -> None:
            nonlocal slots
            if self.keeps_levels or (slots == 0 and self.steering.steered.temperature):
                self.drafts.keep(logits, slots)
            slots += logits.shape[1]

        rows, state = self.roots(requests)
        alive = inputs.alive[:requests].bool()
        rooted = ~alive[:, None] if rows.dead is None else ~alive[:, None] | rows.dead
        temperature, seed = inputs.temperature[:requests], inputs.seed[:requests]
        with self.steering.reading(inputs.limits) if self.captures else nullcontext():
            proposal = draft_tree(
                self.pair.proposer,
                self,
                rows._replace(dead=rooted),
                state,
                nodes=self.num_speculative_steps,
                request=Request(
                    temperature,
                    inputs.greedy[:requests].bool(),
                    counter_rng(seed, inputs.position[:requests], purpose=0),
                ),
                agree=agree,
                keep=keep,
                lost=dead.append,
            ).padded(self.num_speculative_steps)
        self.drafts.store(inputs.request[:requests], inputs.position[:requests], proposal, temperature)
        counts = torch.stack([proposal.tree.valid.sum(), alive.sum()])
        return Grown(proposal, counts, torch.cat(dead, 1).sum(), self.forwards)

    def _grown(self, counts: Tensor) -> None:
        nodes, trees = counts.tolist()
        self.steering.grown(nodes, trees * self.num_speculative_steps)
