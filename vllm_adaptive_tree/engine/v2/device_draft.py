"""Drafting of one batch on Model Runner V2."""

from typing import Any

import numpy as np
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.budget.fixed import ALL
from vllm_adaptive_tree.drafters import Continuations
from vllm_adaptive_tree.engine.v2.lookup_trees import merged_with
from vllm_adaptive_tree.engine.v2.phase_times import GROW
from vllm_adaptive_tree.engine.v2.token_history import token_history
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.merging import Merged, draft_levels
from vllm_adaptive_tree.trees import TreeBatch


class DeviceDraft:
    """`step.Draft` of a `speculator`'s batch."""

    def __init__(self, speculator: Any, target: Any, temperature: Tensor, seeds: Tensor, *, unused: bool):
        """`target`: `TargetOutput` of R requests; temperatures and seeds are vLLM's, by its index; `unused`: True if
        vLLM knows that no request verifies what this step drafts."""
        self.speculator, self.target, self.batch = speculator, target, target.batch
        self.temperature, self.seeds = temperature, seeds
        self.nodes: int = speculator.num_speculative_steps
        self.greedy = speculator.flags.greedy[self.batch.idx_mapping_np]
        most = speculator.flags.nodes[self.batch.idx_mapping_np]
        limited = (most < self.nodes).any()
        self.limits: Tensor | None = async_tensor_h2d(most, device=speculator.device) if limited else None
        middle = self.batch.num_computed_tokens_np + self.batch.num_scheduled_tokens < self.batch.prefill_len_np
        self.crowded = self.batch.num_reqs > speculator.most_trees
        self.unused = unused or self.crowded or bool(middle.all())
        """True if nothing is drafted: the batch is too large, or its requests end, or are amid their prompts."""
        self.drafting = True
        """False if the draft rests."""
        self.ready: np.ndarray | None = None
        """[R] bool: requests that the draft grows a tree for; None: all."""
        self.merged: Merged | None = None
        """Trees with the continuations of the texts in them, of this step."""
        self.stored = True
        """True if `drafts` has the trees of this step."""
        self.tokens: Tensor | None = None
        """Tokens of the trees [R, N]; None: there are none."""

    @property
    def chosen(self) -> Tensor | None:
        """[R] bool: requests whose children are chosen; None: all."""
        chosen: Tensor | None = self.speculator.chosen(self.batch.num_reqs)
        return chosen

    def begin(self) -> int:
        speculator, budget, requests = self.speculator, self.speculator.budget, self.batch.num_reqs
        speculator.readback.next_step()
        speculator.missed = 0
        if self.crowded:
            return 0
        levels: int = ALL if budget is None else budget.begin_step(self.greedy)
        if speculator.pair.looks_up:
            levels = 0
        if budget is not None and levels:
            budget.steer(requests, requests)
        self.drafting = levels > 0
        if budget is not None and levels:
            self.ready = budget.drafting(self.greedy)
        return levels

    def read(self, accepted: Accepted | None, levels: int) -> bool:
        speculator = self.speculator
        verification = speculator.step.verification
        speculator.accepted = None if accepted is None else (verification, accepted)
        if levels:
            self.ready = speculator.catch_up(self.target, self.ready)
        proposes = levels > 0 or speculator.offers is not None
        if not self.crowded and (proposes or speculator.backlog is None):
            speculator.prepare(self.target, self.temperature, self.seeds, self.ready)
        if levels:
            speculator.read(self.target)
        else:
            speculator.rest(self.target)
        speculator.accepted, speculator.forwards = None, 0
        if self.unused or not proposes:
            speculator.drafts.forget()
            return False
        return True

    def grow(self, levels: int) -> Proposal:
        with self.speculator.stats.times.phase(GROW):
            proposal: Proposal = self.speculator.grown_trees(self.batch.num_reqs, levels)
        return proposal

    def empty(self) -> Proposal:
        if self.merged is not None:
            return self.merged.proposal
        self.speculator.drafts.open(0, 0)
        return Proposal.nothing(self.batch.num_reqs, self.nodes, self.speculator.device)

    def continuations(self, levels: int) -> Continuations | None:
        speculator = self.speculator
        lookup = speculator.lookup if levels else speculator.offers
        if lookup is None:
            return None
        if speculator.merges is not None:
            self.merged, continuations = speculator.merges.of(self.batch.num_reqs, drafted=levels > 0)
            return continuations
        everything: Continuations = lookup.continuations(token_history(self.batch, speculator.states))
        return everything.only(None if speculator.pair.mixes else self.chosen)

    def merge(self, proposal: Proposal, continuations: Continuations) -> Proposal:
        if self.merged is None:
            pair, self.stored = self.speculator.pair, False
            self.merged = merged_with(pair, proposal, continuations, self.chosen, nodes=self.nodes)
        return self.merged.proposal

    def keep(self, proposal: Proposal, merged: Continuations | None) -> None:
        speculator, batch = self.speculator, self.batch
        if not self.stored or self.limits is not None:  # `drafts` has another tree, or a whole one
            proposal = proposal.padded(self.nodes)
            inputs, requests = speculator.inputs, batch.num_reqs
            position, temperature = inputs.position[:requests], inputs.temperature[:requests]
            speculator.drafts.store(batch.idx_mapping, position, proposal, temperature)
        tree = proposal.tree
        rest = () if self.ready is None else [batch.req_ids[row] for row in np.flatnonzero(~self.ready)]
        speculator.stats.drafted(batch.req_ids, tree, rests=not self.drafting, without_draft=rest)
        if speculator.record is not None:
            speculator.record.drafted(batch.req_ids, tree)
        if speculator.budget is not None:
            speculator.budget.drafted(tree, self.greedy, self._level(tree), self.ready)
        self.tokens = tree.tokens

    def _level(self, tree: TreeBatch) -> Tensor | None:
        """[R, N] as `Planner.observe_trees` takes it, of the trees as they were cut; None: no look-up takes part."""
        if self.merged is not None:
            level = self.merged.level[:, : tree.depth.shape[1]]
            return level if self.limits is None else level.masked_fill(tree.depth == 0, 0)
        continuations = self.speculator.draft_continuations if self.drafting else None
        return None if continuations is None else draft_levels(tree, continuations)

    def end(self) -> None:
        speculator, batch = self.speculator, self.batch
        if speculator.budget is not None:
            speculator.budget.end_step(
                batch.num_reqs,
                batch.num_tokens,
                float(batch.num_computed_tokens_np @ batch.num_scheduled_tokens) / max(1, batch.num_tokens),
                speculator.forwards,
                prefills=batch.has_prefill,
                missed=self.unused or bool(speculator.missed),
                trees=self.tokens is not None,
            )
