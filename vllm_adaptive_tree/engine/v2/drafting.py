"""Drafting of trees on Model Runner V2 with any kind of draft: a mixin over vLLM's speculators."""

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
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_adaptive_tree.acceptance import Accepted, TargetOnly
from vllm_adaptive_tree.drafters import Continuations, Frontier, Rows
from vllm_adaptive_tree.engine.common.node_quota import MOST_TREES
from vllm_adaptive_tree.engine.v2.device import compiles
from vllm_adaptive_tree.engine.v2.device_draft import DeviceDraft
from vllm_adaptive_tree.engine.v2.drafts import Drafts
from vllm_adaptive_tree.engine.v2.graphs import DraftGraphs, Piece, ladder
from vllm_adaptive_tree.engine.v2.kernel_dispatch import acceptance_bytes, counter_rng
from vllm_adaptive_tree.engine.v2.lookup_trees import LookupTrees, fused_search
from vllm_adaptive_tree.engine.v2.phase_times import DRAFT
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
from vllm_adaptive_tree.engine.v2.verification import Verification
from vllm_adaptive_tree.kernels.reading import CHOSEN, READY, Cache, DraftInputs, Shaping, StepTensors
from vllm_adaptive_tree.methods import verifiable_lookup
from vllm_adaptive_tree.proposers import Proposal, Request, draft_tree
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE
from vllm_adaptive_tree.step import TreeStep
from vllm_adaptive_tree.trees.tree_batch import EMPTY

LEVEL_ROWS = 256
"""Rows of a draft level of the whole batch that cost a GPU hardly more than one row: the draft's weights bound it."""
FEWEST_COLUMNS = 4
KEPT = 1 << 30
"""Bytes of logits that stay until their trees are verified, in the target's dtype; vLLM's sampler takes as many."""


def level_width(requests: int, nodes: int, rows: int, *, levels: int = 1, kept: int | None = None) -> int:
    """Columns that a draft level reads of each of `requests` trees of `nodes` nodes.

    Args:
        rows: most rows of any forward (`max_num_batched_tokens`).
        levels: that the draft reads, the root's too.
        kept: rows whose logits may stay until the trees are verified, if they do; one column a level always does.

    Lossless for every rule: the width follows from the number of requests alone, before anything is sampled, and a node
    whose column is trimmed counts as never read, so a rule takes the target's own distribution after it. Nodes are kept
    by their order, which the proposer fixes before their children are drawn.
    """
    widths = [nodes, max(LEVEL_ROWS // requests, FEWEST_COLUMNS), rows // requests]
    if kept is not None and levels > 1:
        widths.append((kept // requests - 1) // (levels - 1))
    return max(1, min(widths))


class TargetOutput(NamedTuple):
    """Output of the target for a step of R requests, as vLLM passes it to a speculator."""

    batch: Any  # vLLM's InputBatch
    metadata: Any  # of the attention layers, by name
    slots: Any  # [rows] of the cache, by the name of the layer
    hidden: Tensor  # [rows, H]: last hidden states
    auxiliary: list[Tensor] | None  # [rows, H] each
    num_sampled: Tensor  # [R], 0 in the middle of a prompt
    num_rejected: Tensor  # [R]
    last_sampled: Tensor  # by vLLM's index of the request
    next_prompt_tokens: Tensor  # by the same index


class DraftedTrees(NamedTuple):
    """Result of drafting for R requests."""

    proposal: Proposal
    counts: Tensor  # [2]: nodes, and trees that had to grow
    dead: Tensor  # []: rows without a distribution where one was expected
    forwards: int


class TreeDrafting(BaseSpeculator):
    """Mixin before one of vLLM's speculators among the bases of a class. That class is a kind of draft, and defines how
    it reads accepted tokens and grows.
    """

    draft_attn_layer_names: Any = frozenset[str]()
    """Attention layers of the draft; their K/V is in vLLM's paged cache."""
    hidden_size: int | None = None
    """Width of its `Rows.hidden`."""
    reads_late = False
    """True if it reads nothing in a step that drafts nothing, and needs a `DraftBacklog` to read that later."""
    kept_rows: int | None = None
    """Rows of a batch whose logits may stay until its trees are verified; None: none do."""
    forwards = 0
    """Draft forwards after the roots', for the last trees; `grow` counts them."""
    limit = 1 << 62
    """Most tokens that it can read; a longer request continues without drafts."""
    shift = 0
    """1: a row that it reads has the token after its position."""
    reading_width = 0
    """Most rows of a request that it reads in one piece, where there is no prompt; 0: it has no such piece."""
    graphs: DraftGraphs
    missed: int
    """Tokens of earlier steps that it has read in this step."""
    backlog: Any = None
    """Backlog of a draft that `reads_late`, if a budget may skip drafting."""
    initial: Tensor | None = None
    """[trees, W] first layers that the target has sampled itself, -1 pads; None: there are none."""
    off = False
    """True once nothing is read or drafted any more."""

    def __init__(self, runner: Any, states: Any):
        """Runs after vLLM's part of the class has been initialized. `states`: vLLM's RequestState."""
        self.states, self.vllm_config = states, runner.vllm_config
        self.options, self.pair, self.flags = runner.options, runner.pair, runner.flags
        self.step: TreeStep[Verification] = runner.step
        self.budget, self.steering, self.readback = runner.budget, runner.steering, AsyncReadback()
        self.stats, self.record = runner.stats, runner.record
        # draft temperature, if it does not follow the request's own
        self.fixed_temperature = self.options.tree.temperature(2.0)
        self.follows_request = self.fixed_temperature != self.options.tree.temperature(3.0)
        self.device, self.num_speculative_steps = runner.device, self.options.num_speculative_tokens
        if self.pair.proposer.gate is not None:
            self.pair.proposer.gate.to(self.device)
        self.most_rows = self.vllm_config.scheduler_config.max_num_batched_tokens
        self.most_trees = min(runner.max_num_reqs, MOST_TREES)
        """Requests of a batch above which nothing is drafted."""
        self.selected = self.budget is not None or compiles(self.device)
        """True if the nodes that are verified may be selected: then the host knows only the sum of all rows."""
        self.may_rest = self.options.tree.budget == "auto" or runner.max_num_reqs > self.most_trees
        vocabulary, nodes = self.vllm_config.model_config.get_vocab_size(), self.num_speculative_steps
        self.drafts = Drafts(runner.max_num_reqs, self.most_trees, nodes, vocabulary, self.device)
        if self.pair.proposer.acceptance is not None:
            self.pair.proposer.acceptance.to(self.device)
            self.drafts.cell = torch.full_like(self.drafts.read, -1)
        self.nothing = torch.full((runner.max_num_reqs, self.num_speculative_steps), EMPTY, device=self.device)
        """[requests, N]: what is passed to vLLM where nothing is drafted."""
        self.missed = 0
        lookup, text = self.options.lookup, self.options.text
        self.lookup = None if lookup is None else lookup.build(vocabulary)
        if lookup is not None and lookup.by_default and fused_search(self.lookup, self.device) is None:
            self.lookup = None  # in tensors it costs as much as a level
        self.text = None if text is None else text.build(vocabulary)
        self.offers = self.lookup or verifiable_lookup(self.text, self.pair)
        """Look-up that proposes trees while the draft rests."""
        search = fused_search(self.offers, self.device)
        self.merges = None if search is None else LookupTrees(self, search)
        """Trees of that look-up, if a kernel searches."""
        if self.lookup is not None and self.pair.mixes:
            self.drafts.chosen = torch.zeros_like(self.drafts.read, dtype=torch.bool)
        if (first := self.pair.init_width) > 1:
            self.initial = torch.full((self.most_trees, first), -1, device=self.device)
            self.drafts.initial = torch.zeros(self.most_trees, dtype=torch.int64, device=self.device)
        self.drafted_levels = self.levels = min(self.pair.proposer.max_depth, nodes)
        """Largest depth of drafted nodes; of a tree."""
        if self.offers is not None:
            self.levels = min(max(self.levels, self.offers.length or nodes), nodes)
        self.captures = compiles(self.device) and self.capturable
        """True if graphs may hold its pieces."""
        if self.keeps_levels:
            self.kept_rows = KEPT // (vocabulary * self.vllm_config.model_config.dtype.itemsize)
            self.drafts.most_kept = max(size * self._slots(size) for size in self.sizes)
        self.inputs = DraftInputs.empty(self.most_trees, self.reading_width, self.device)
        self.everyone = torch.ones(self.most_trees, dtype=torch.int8, device=self.device)
        self.accepted: tuple[Verification, Accepted] | None = None
        """Accepted paths of this step, while the draft reads them."""
        self.dead: Tensor | None = None  # number of dead rows of the last trees, not yet in the metrics

    def width(self, requests: int) -> int:
        """Columns of a level in a batch of so many requests."""
        nodes, levels = self.num_speculative_steps, self.drafted_levels
        return level_width(requests, nodes, self.most_rows, levels=levels, kept=self.kept_rows)

    @property
    def sizes(self) -> list[int]:
        """Numbers of requests that its pieces run for; a batch is padded to the next."""
        return ladder(self.most_trees) if self.captures else list(range(1, 1 + self.most_trees))

    def padded(self, requests: int) -> int:
        return next(size for size in self.sizes if size >= requests)

    @property
    def capturable(self) -> bool:
        """True if graphs may hold its pieces, on a device that has graphs."""
        return self.pair.proposer.capturable

    @property
    def keeps_levels(self) -> bool:
        """True if a rule reads the draft's distributions."""
        return self.pair.rule is not TargetOnly

    @property
    def tells_chosen(self) -> bool:
        """True if the proposer may ask which requests walk with the target's own draws; of most methods the greedy ones
        have chosen children."""
        proposer = self.pair.proposer
        return proposer.acceptance is not None or proposer.either

    def chosen(self, requests: int) -> Tensor | None:
        """[R] bool: requests of this step that walk with the target's own draws; None: all do."""
        return self.inputs.chosen[:requests].bool() if self.tells_chosen else None

    @abstractmethod
    def read(self, target: TargetOutput) -> None:
        """Read the tokens that this step has accepted, up to the next roots."""

    @abstractmethod
    def roots(self, requests: int) -> tuple[Rows, Any]:
        """Rows of the roots (W = 1) of so many requests after `read`, padding included, and the state of their
        trees."""

    @abstractmethod
    def grow(self, tokens: Tensor, parent: Tensor, state: Any) -> tuple[Rows, Any]:
        """Grow a level, as in `drafters.Drafter`."""

    @abstractmethod
    def rest(self, target: TargetOutput) -> None:
        """Run a step in which the draft rests."""

    @abstractmethod
    def dummy_run(self, target: TargetOutput, *, without_attention: bool) -> None:
        """Run while vLLM measures memory, or warms up."""

    def catch_up(self, target: TargetOutput, drafting: np.ndarray | None) -> np.ndarray | None:
        """Read the tokens skipped before this step by the requests `drafting` [R] bool (None: all); for the others the
        draft rests. Returns [R] bool, True for those of them that are complete; None: all are."""
        return drafting

    def settle(self) -> None:
        """Read what would be lost between two steps: a request with skipped tokens leaves, or a block is copied."""

    def cache(self, requests: int) -> Cache | None:
        """Draft's K/V cache of the first requests of this step's batch."""
        return None

    def forget(self, request: str) -> None:
        """Drop a request that has ended, is preempted, or comes again with more input."""
        if self.lookup is not None:
            self.lookup.forget([request])

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Create the manager of the draft's graphs. `cudagraph_mode`: of the engine; if not NONE, whole graphs hold the
        pieces of drafting."""
        self.graphs = DraftGraphs(
            self.vllm_config, self.device, cudagraph_mode if self.captures else CUDAGraphMode.NONE
        )

    def capture(self) -> None:
        """Record the pieces when vLLM records graphs; no request is there."""
        if self.off:
            return
        self.inputs.clear()
        self.graphs.record(self.pieces())
        self.drafts.forget()

    def release_graphs(self) -> None:
        """Free what is recorded."""
        self.graphs.release_graphs()
        self.graphs.results.clear()

    def pieces(self) -> dict[Piece, Callable[[], Any]]:
        """Pieces that a step may run, those of most requests first. Those of fewer levels are for a budget."""
        fewest = 1 if self.options.tree.budget == "auto" else self.drafted_levels
        depths = () if self.pair.looks_up else range(self.drafted_levels, fewest - 1, -1)
        grown: dict[Piece, Callable[[], Any]] = {
            Piece.of(size, levels): partial(self.trees, size, levels)
            for size in reversed(self.sizes)
            for levels in depths
        }
        return grown if self.merges is None else grown | self.merges.pieces()

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
        num_speculative_tokens: int | None = None,
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
                if skip_attn_for_dummy_run and compiles(self.device):
                    self.profile_acceptance()
            return self._nothing(input_batch)
        draft = DeviceDraft(self, target, temperature, seeds, unused=num_speculative_tokens == 0)
        with self.stats.times.phase(DRAFT):
            self.step.draft(draft)
        return self._nothing(input_batch) if draft.tokens is None else draft.tokens

    def profile_acceptance(self) -> None:
        """Hold as much memory as accepting the largest batch takes, so that vLLM's profile sees it."""
        config, nodes = self.vllm_config.model_config, self.num_speculative_steps
        vocabulary = config.get_vocab_size()
        rows = min(self.most_trees * (1 + nodes), self.most_rows, get_max_chunk_logits(vocabulary))
        sizes = {"rows": rows, "levels": self.levels, "vocabulary": vocabulary, "size": config.dtype.itemsize}
        held = acceptance_bytes(self.pair, requests=self.most_trees, **sizes)
        torch.empty(held, dtype=torch.uint8, device=self.device)

    def _nothing(self, batch: Any) -> Tensor:
        return self.nothing[: batch.num_reqs]

    def prepare(self, target: TargetOutput, temperature: Tensor, seeds: Tensor, ready: np.ndarray | None) -> None:
        """Fill `inputs`, which the pieces of this step read. Temperatures and seeds are vLLM's, by its index."""
        batch, states, proposer = target.batch, self.states, self.pair.proposer
        if self.initial is not None:
            self.initial.fill_(-1)
            if self.step.initial is not None:
                self.initial[: batch.num_reqs] = self.step.initial
        fitted = GREEDY_DRAFT_TEMPERATURE if self.budget is None else self.budget.greedy_temperature
        self.inputs.update(
            StepTensors(
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
                self.fixed_temperature,
                self.follows_request,
                proposer.threshold,
                proposer.floor,
            ),
            self._request_flags(batch, ready),
            self.cache(batch.num_reqs),
            padded=self.padded(batch.num_reqs),
            padding=self.drafts.padding,
            limit=self.limit,
            shift=self.shift,
        )

    def _request_flags(self, batch: Any, ready: np.ndarray | None) -> Tensor:
        """[R or more] int8, as `DraftInputs.update` takes them."""
        if not self.tells_chosen and ready is None:
            return self.everyone
        chosen = self.flags.from_target[batch.idx_mapping_np]
        flags = (True if ready is None else ready) * np.int8(READY) + chosen * np.int8(CHOSEN)
        return async_tensor_h2d(flags.astype(np.int8), device=self.device)

    @property
    def draft_continuations(self) -> Continuations | None:
        """Continuations for the last trees, found by a draft that is a look-up."""
        return None

    def grown_trees(self, requests: int, most: int) -> Proposal:
        """Trees of the draft itself, of at most so many levels; they are in `drafts` too."""
        padded, levels = self.padded(requests), min(most, self.drafted_levels)
        self._open(padded)
        grown = self.graphs.run(Piece.of(padded, levels), partial(self.trees, padded, levels))
        self.dead, self.forwards = grown.dead, grown.forwards
        if self.steering.steered.fill and 1 + self.forwards < most:  # else the limit may have ended them
            self.readback.send(grown.counts, self._grown)
        return grown.proposal.first(requests)

    def _slots(self, requests: int) -> int:
        """Rows of each of so many requests whose logits stay until the trees are verified."""
        levels = self.drafted_levels if self.keeps_levels else 1
        return 1 + (levels - 1) * self.width(requests)

    def _open(self, padded: int) -> None:
        self.drafts.open(padded, self._slots(padded))

    def trees(self, requests: int, levels: int) -> DraftedTrees:
        """Trees of at most so many levels for so many requests, padding included, grown from `inputs`; a piece."""
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
                    initial=None if self.initial is None else self.initial[:requests],
                    chosen=self.chosen(requests),
                ),
                agree=agree,
                keep=keep,
                lost=dead.append,
            ).padded(self.num_speculative_steps)
        self.drafts.store(inputs.request[:requests], inputs.position[:requests], proposal, temperature)
        if self.initial is not None and self.drafts.initial is not None:
            self.drafts.initial[:requests] = (self.initial[:requests] >= 0).sum(1)
        counts = torch.stack([proposal.tree.valid.sum(), alive.sum()])
        return DraftedTrees(proposal, counts, torch.cat(dead, 1).sum(), self.forwards)

    def _grown(self, counts: Tensor) -> None:
        nodes, trees = counts.tolist()
        self.steering.grown(nodes, trees * self.num_speculative_steps)
