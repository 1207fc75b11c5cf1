"""Drafting of one batch on Model Runner V1: catch up on the accepted tokens, grow the trees, keep what pays."""

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.budget.fixed import ALL
from vllm_adaptive_tree.drafters import Continuations, Rows
from vllm_adaptive_tree.drafters.lookup import LookupState
from vllm_adaptive_tree.engine.common.node_quota import nodes_per_request
from vllm_adaptive_tree.engine.common.ranks import number_from_rank_0, proposal_from_rank_0, sync_frontier
from vllm_adaptive_tree.engine.common.request_flags import is_greedy, most_nodes
from vllm_adaptive_tree.engine.grammar.masked_drafter import Branch, MaskedDrafter, masked_continuations
from vllm_adaptive_tree.engine.metrics.step_figures import BUDGET, DRAFT
from vllm_adaptive_tree.engine.targets.checks import step_limit
from vllm_adaptive_tree.engine.v1.budget import HostBudget
from vllm_adaptive_tree.engine.v1.catch_up import CatchUp, StepView
from vllm_adaptive_tree.engine.v1.drafter import TimedDrafter
from vllm_adaptive_tree.engine.v1.drafts import Draft, to_drafts
from vllm_adaptive_tree.engine.v1.requests import HostRequests
from vllm_adaptive_tree.engine.v1.text_drafter import token_history
from vllm_adaptive_tree.engine.v1.verification import Verification
from vllm_adaptive_tree.proposers import Proposal, Request, draft_tree
from vllm_adaptive_tree.proposers.merging import counted, without_own_draws
from vllm_adaptive_tree.proposers.merging_cpu import draft_levels, merge
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE


class HostDraft:
    """`step.Draft` of a `runner`'s batch. Requests that finish, skip drafting, want no trees or have tokens left to
    read get no tree."""

    def __init__(
        self,
        runner: Any,
        scheduled: Mapping[str, int],
        sampled: Sequence[bool],
        states: Sequence[Tensor],
        grammars: Mapping[int, Branch],
    ):
        """
        Args:
            scheduled: tokens of this step by request.
            sampled: True if a request has sampled in it, by row.
            states: the target's hidden states of its flat batch, as in `V1Drafter.catch_up`.
            grammars: by row.
        """
        self.runner, self.engine, self.budget = runner, runner.engine, runner.budget
        self.scheduled, self.sampled, self.states, self.grammars = scheduled, sampled, states, grammars
        self.names = list(runner.input_batch.req_ids)
        _, self.room = step_limit(runner.scheduler_config)
        self.nodes = nodes_per_request(running=len(self.names), nodes=runner.num_spec_tokens, room=self.room)
        self.pending: list[CatchUp] = []
        """Items that the step has for the draft; those that it reads now; those with a tree."""
        self.to_read: list[CatchUp] = []
        self.rooted: list[CatchUp] = []
        self.rows = Rows(torch.empty(0))
        """Rows of the roots, and the draft's state of their trees."""
        self.state: Any = None
        self.levels: list[Tensor] = []
        """Logits of each level, if the rule reads them for any request, or a recorder does."""
        self.most = [most_nodes(runner.requests[name].sampling_params) for name in self.names]
        """Most nodes that each request of the batch wants."""
        self.greedy: list[bool] = []
        """Of each request of the batch."""
        self.drafting = True
        """False if the draft rests."""
        self.resting: set[int] = set()
        """Rows of requests that rest on while others try the draft."""
        self.looking = 0.0
        """Seconds of the look-up."""

    def begin(self) -> int:
        greedy = self.greedy = [is_greedy(self.runner.requests[name].sampling_params) for name in self.names]
        looks_up = self.runner.pair.looks_up
        levels = (0 if looks_up else ALL) if self.budget is None else self.budget.begin_levels(greedy)
        self.drafting = levels > 0 and any(self.most)
        self.engine.fallback_reasons = dict.fromkeys(self.names, DRAFT if levels or looks_up else BUDGET)
        if self.drafting and self.budget is not None:
            self.resting = {row for row, drafts in enumerate(self.budget.drafting(greedy)) if not drafts}
            self.engine.fallback_reasons |= dict.fromkeys((self.names[row] for row in self.resting), BUDGET)
        return levels

    def read(self, accepted: Accepted | None, levels: int) -> bool:
        runner, drafting = self.runner, self.drafting
        with runner.clock.phase("draft"):
            step = StepView(runner, self.scheduled, self.sampled, self.nodes)
            self.pending = runner.drafter.pending(step, _paths(runner.step.verification, accepted))
            room = self.room + len(self.pending)  # each has a new root
            if self.resting:  # before those that draft, which may have a prefix hit on their blocks
                self.to_read = runner.drafter.to_read(self._pending(resting=True), room, False, self.states)
            self.to_read += runner.drafter.to_read(self._pending(resting=False), room, drafting, self.states)
            self.rows, self.state = runner.drafter.catch_up(self.to_read, self.states, runner.proposer.mask(self.nodes))
        if self.state is None and (drafting or runner.offers is None):
            return False
        self.rooted = [item for item in (self.to_read if drafting else self.pending) if item.root is not None]
        if not self.rooted:
            return False
        reads_hidden = runner.recorder is not None and runner.recorder.reads_hidden
        self.drafter = TimedDrafter(runner.drafter, runner.clock, [self.rows.hidden] if reads_hidden else [])
        pairs = enumerate(self.rooted)
        self.grammars = {place: self.grammars[item.row] for place, item in pairs if item.row in self.grammars}
        return True

    def grow(self, levels: int) -> Proposal:
        runner, dead, chosen = self.runner, list[Tensor](), self.request.chosen
        keep = runner.recorder is not None or chosen is None or not chosen.all()
        agree = sync_frontier
        if self.budget is not None:
            agree = self.budget.agreed(sync_frontier, len(self.rooted), self.num_without_tree)
        with runner.clock.phase("tree"):
            masked = MaskedDrafter(self.drafter, self.grammars)
            proposal = draft_tree(
                runner.proposer,
                masked,
                masked.roots(self.rows),
                self.state,
                nodes=self.nodes,
                request=self.request,
                agree=agree,
                keep=self.levels.append if keep else lambda _: None,
                lost=dead.append,
            )
            self.engine.num_dead_rows += int(torch.cat(dead, 1).sum())
            proposal = proposal_from_rank_0(proposal)
        if self.budget is None or not self.budget.limited:
            runner.steering.grown(int(proposal.tree.valid.sum()), self.nodes * len(self.rooted))
        return proposal

    def empty(self) -> Proposal:
        return Proposal.nothing(len(self.rooted), self.nodes, torch.device("cpu"))

    def continuations(self, levels: int) -> Continuations | None:
        lookup = self.runner.lookup if levels else self.runner.offers
        if lookup is None:
            return None
        started = time.perf_counter()
        roots = {item.row: item.root for item in self.rooted if item.root is not None}
        greedy = [self.greedy[row] for row in roots]
        budget = None if levels else self.budget
        if budget is not None and not budget.look_up_pays(greedy, self.nodes, self.num_without_tree):
            self.engine.fallback_reasons |= dict.fromkeys(self.rooted_names, BUDGET)
            return None
        with self.runner.clock.phase("tree"):
            found = lookup.continuations(token_history(self.runner.input_batch, roots))
            found = masked_continuations(found, self.grammars)
            some = levels or number_from_rank_0(int(found.weight.any()))  # rank 0 alone knows the grammars
            if some:
                found = found.only(None if self.runner.pair.mixes else self.request.chosen)
            elif self.budget is not None:
                self.budget.found_nothing(greedy, self.nodes)
        self.looking = time.perf_counter() - started
        return found if some else None

    def merge(self, proposal: Proposal, continuations: Continuations) -> Proposal:
        pair, chosen = self.runner.pair, self.request.chosen
        with self.runner.clock.phase("tree"):
            merged = merge(proposal, continuations, nodes=self.nodes, most=pair.most)
            return merged if chosen is None or not pair.mixes else counted(merged, among=~chosen)

    def keep(self, proposal: Proposal, merged: Continuations | None) -> None:
        runner, engine = self.runner, self.engine
        with runner.clock.phase("tree"):
            if merged is not None:
                proposal = proposal_from_rank_0(proposal)
            request = self.request
            drafts = to_drafts(proposal, self.levels, request.temperature, request.initial, self.drafter.hidden)
            if not self.drafting:
                drafts = [draft._replace(from_lookup=True) if len(draft.tree) else draft for draft in drafts]
        if runner.record is not None:
            runner.record.drafted(self.rooted_names, proposal.tree)
        sizes = {name: len(draft.tree) for name, draft in zip(self.rooted_names, drafts, strict=True)}
        engine.num_drafted_nodes += sum(sizes.values())
        if self.budget is not None:
            with runner.clock.phase("tree"):
                drafts = self._cut(self.budget, drafts, proposal, merged)
        # read only if none of it is left
        engine.fallback_reasons |= {name: BUDGET for name, size in sizes.items() if size}
        engine.drafts |= zip(self.rooted_names, drafts, strict=True)

    @property
    def limits(self) -> Tensor | None:
        most = [self.most[item.row] for item in self.rooted]
        return torch.tensor(most) if min(most) < self.nodes else None

    def end(self) -> None:
        if self.budget is not None and self.runner.step.verification is not None:
            self.budget.end_step(self.runner.step.verification)

    @property
    def rooted_names(self) -> list[str]:
        return [self.names[item.row] for item in self.rooted]

    @property
    def num_without_tree(self) -> int:
        """Number of requests that have a root or want no tree, and have none."""
        return sum(item.root is not None for item in self.pending) + self.most.count(0) - len(self.rooted)

    def _pending(self, *, resting: bool) -> list[CatchUp]:
        return [item for item in self.pending if (item.row in self.resting) == resting]

    @cached_property
    def request(self) -> Request:
        """View of the requests with trees for the proposer."""
        runner, initial = self.runner, self.runner.step.initial
        roots = [item.root for item in self.rooted if item.root is not None]
        requests = HostRequests(runner, self.rooted_names, roots)
        temperatures = [
            0.0 if greedy else state.sampling_params.temperature
            for greedy, state in zip(requests.greedy.tolist(), requests.states, strict=True)
        ]
        fitted = GREEDY_DRAFT_TEMPERATURE if self.budget is None else self.budget.greedy_temperature
        return Request(
            temperature=torch.tensor([runner.options.tree.temperature(value, fitted) for value in temperatures]),
            greedy=requests.greedy,
            rng=requests.rng(purpose=0),
            initial=None if initial is None else initial[[item.row for item in self.rooted]],
            chosen=torch.tensor(requests.flags),
        )

    def _cut(
        self, budget: HostBudget, drafts: list[Draft], proposal: Proposal, merged: Continuations | None
    ) -> list[Draft]:
        greedy, roots = self.request.greedy, list[Tensor | None]([None] * len(drafts))
        if self.drafting:
            pairs = zip(greedy.tolist(), self.rows.logits[:, 0], strict=True)
            roots = [logits if certain else None for certain, logits in pairs]
        if merged is None and self.runner.offers is not None and isinstance(self.state, LookupState):
            merged = self.state.continuations  # the draft is a look-up
        level = None if merged is None else draft_levels(proposal.tree, merged)
        if level is not None and self.request.chosen is not None and self.runner.pair.mixes:
            level = without_own_draws(level, proposal, among=~self.request.chosen)
        prompts = self.runner.input_batch.num_prompt_tokens
        new = {item.row: item for item in self.pending}
        return budget.cut(
            drafts,
            proposal,
            greedy,
            roots,
            self.drafter.levels,
            level=level,
            looking=self.looking,
            num_without_tree=self.num_without_tree,
            prompts=any(item.start < prompts[item.row] for item in self.to_read),
            gaps=any(has_gap(item, new[item.row], prompts[item.row]) for item in self.to_read),
        )


def has_gap(item: CatchUp, new: CatchUp, prompt: int) -> bool:
    """True if an item has more than a step's `new` tokens, but for what waited of its `prompt` until that was whole."""
    return item.start != new.start or len(item.tokens) != len(new.tokens) or (item.late > 0 and item.start >= prompt)


def _paths(verification: Verification | None, accepted: Accepted | None) -> dict[int, list[int]]:
    """Accepted nodes of each tree, by row."""
    if verification is None or accepted is None:
        return {}
    paths = accepted.nodes.tolist()
    return {row: [node for node in paths[row] if node >= 0] for row in verification.trees}
