"""Drafting: catch up on the accepted tokens, grow the trees, keep of them what the budget affords."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.drafters import Continuations, Drafter, Rows
from vllm_adaptive_tree.drafters.lookup import Reading
from vllm_adaptive_tree.engine.common.node_quota import nodes_per_request
from vllm_adaptive_tree.engine.common.ranks import proposal_from_rank_0, sync_frontier
from vllm_adaptive_tree.engine.common.request_flags import is_greedy
from vllm_adaptive_tree.engine.common.step_figures import BUDGET, DRAFT
from vllm_adaptive_tree.engine.v1.catch_up import Step
from vllm_adaptive_tree.engine.v1.drafter import TimedDrafter
from vllm_adaptive_tree.engine.v1.drafts import Draft, to_drafts
from vllm_adaptive_tree.engine.v1.masked_drafter import Branch, MaskedDrafter, masked_continuations
from vllm_adaptive_tree.engine.v1.text_drafter import texts
from vllm_adaptive_tree.proposers import Proposal, Request, draft_tree
from vllm_adaptive_tree.proposers.merging import draft_levels, merge
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE
from vllm_adaptive_tree.rng import CounterRNG


class DraftingStep:
    """The part of a `runner`'s step that drafts the next trees."""

    def __init__(self, runner: Any):
        self.runner = runner
        self.dead = self.grown = 0  # draft rows without a distribution, and nodes, until the metrics take the numbers
        self.without: dict[str, str] = {}  # requests of the last batch that got no tree, and why

    def propose(
        self,
        scheduled: Mapping[str, int],
        sampled: Sequence[bool],
        states: Sequence[Tensor],
        grammars: Mapping[int, Branch],
    ) -> dict[str, Draft]:
        """Trees for the next step by request; none for those that are finishing, skip drafting or have tokens left to
        read.

        Args:
            scheduled: tokens of this step by request.
            sampled: whether a request has sampled in it, by row.
            states: the target's hidden states of its flat batch, as in `V1Drafter.catch_up`.
            grammars: by row.
        """
        runner, names, budget = self.runner, self.runner.input_batch.req_ids, self.runner.budget
        room = runner.scheduler_config.max_num_batched_tokens
        nodes = nodes_per_request(running=len(names), nodes=runner.num_spec_tokens, room=room)
        greedy = [is_greedy(runner.requests[name].sampling_params) for name in names]
        drafting = budget is None or budget.drafts(greedy)
        self.without = dict.fromkeys(names, DRAFT if drafting else BUDGET)
        with runner.clock.phase("draft"):
            news = runner.drafter.news(Step(runner, scheduled, sampled, nodes), runner.accepted)
            items = runner.drafter.due(news, room + len(news), drafting)  # each may have its new root
            rows, state = runner.drafter.catch_up(items, states, runner.proposer.mask(nodes))
        if state is None and (drafting or runner.offers is None):
            return {}
        rooted = [item for item in (items if drafting else news) if item.root is not None]
        if not rooted:
            return {}
        names = [names[item.row] for item in rooted]
        others = sum(item.root is not None for item in news) - len(rooted)
        request = self._request(names, torch.tensor([item.root for item in rooted]))
        if runner.initial is not None:
            request = request._replace(initial=runner.initial[[item.row for item in rooted]])
        reads_hidden = runner.recorder is not None and runner.recorder.reads_hidden
        drafter = TimedDrafter(runner.drafter, runner.clock, [rows.hidden] if reads_hidden else [])
        grammars = {at: grammars[item.row] for at, item in enumerate(rooted) if item.row in grammars}
        with runner.clock.phase("tree"):
            levels = list[Tensor]()
            proposal = Proposal.nothing(len(rooted), nodes, torch.device("cpu"))
            if drafting:
                masked = MaskedDrafter(drafter, grammars)
                proposal = self._grown(masked, masked.roots(rows), state, nodes, request, others, levels)
            started = time.perf_counter()
            places = {item.row: item.root for item in rooted if item.root is not None}
            found = self._found(state, places)
            if found is not None and (runner.lookup is not None or not drafting):
                found = masked_continuations(found, grammars)
                merged = merge(proposal, found, nodes=nodes, max_depth=runner.proposer.max_depth)
                proposal = proposal_from_rank_0(merged)
            looking = time.perf_counter() - started
            drafts = to_drafts(proposal, levels, request.temperature, request.initial, drafter.hidden)
        if runner.record is not None:
            runner.record.drafted(names, proposal.tree)
        grown = {name: len(one.tree) for name, one in zip(names, drafts, strict=True)}
        self.grown += sum(grown.values())
        with runner.clock.phase("tree"):  # once more: the budget reads what the trees have cost
            if budget is not None:
                roots: list[Tensor | None] = [None] * len(rooted)
                if drafting:
                    pairs = zip(request.greedy.tolist(), rows.logits[:, 0], strict=True)
                    roots = [logits if certain else None for certain, logits in pairs]
                prompts = runner.input_batch.num_prompt_tokens
                reading = any(one.start < prompts[one.row] for one in news)
                drafts = budget.cut(
                    drafts,
                    proposal,
                    request.greedy,
                    roots,
                    drafter.levels,
                    level=None if found is None else draft_levels(proposal.tree, found),
                    looking=looking,
                    others=others,
                    prompts=reading,
                    gaps=items != news,
                )
        self.without |= {name: BUDGET for name, count in grown.items() if count}  # unless some of it is left
        return dict(zip(names, drafts, strict=True))

    def _request(self, names: list[str], position: Tensor) -> Request:
        """These requests as the proposer sees them, with roots at `position` [R]."""
        runner, states = self.runner, [self.runner.requests[name] for name in names]
        greedy = [is_greedy(one.sampling_params) for one in states]
        wanted = [0.0 if none else one.sampling_params.temperature for one, none in zip(states, greedy, strict=True)]
        fitted = GREEDY_DRAFT_TEMPERATURE if runner.budget is None else runner.budget.greedy_temperature
        return Request(
            temperature=torch.tensor([runner.options.tree.temperature(one, fitted) for one in wanted]),
            greedy=torch.tensor(greedy),
            rng=CounterRNG(runner.seeds.of(states), position, purpose=0),
        )

    def _found(self, state: Any, roots: Mapping[int, int]) -> Continuations | None:
        """What a look-up says of requests with `roots`: their rows in the batch -> positions. `state`: of the draft;
        None if it rests."""
        runner = self.runner
        if isinstance(state, Reading):  # the draft is one
            return state.found if runner.offers is not None else None
        lookup = runner.offers if state is None else runner.lookup
        found: Continuations | None = None if lookup is None else lookup.continuations(texts(runner.input_batch, roots))
        return found

    def _grown(
        self,
        drafter: Drafter,
        rows: Rows,
        state: Any,
        nodes: int,
        request: Request,
        others: int,
        levels: list[Tensor],
    ) -> Proposal:
        """One tree for each of R requests from the `rows` of their roots, of rank 0; `levels` gets the logits of every
        level, if a rule reads them."""
        runner, budget, dead = self.runner, self.runner.budget, list[Tensor]()
        keep = runner.recorder is not None or runner.pair.rule is not RULES["target_only"]
        proposal = draft_tree(
            runner.proposer,
            drafter,
            rows,
            state,
            nodes=nodes,
            request=request,
            agree=sync_frontier if budget is None else budget.agreed(sync_frontier, len(request.greedy), others),
            keep=levels.append if keep else lambda _: None,
            lost=dead.append,
        )
        self.dead += int(torch.cat(dead, 1).sum())
        proposal = proposal_from_rank_0(proposal)
        grown = int(proposal.tree.valid.sum())
        if budget is None or not budget.limited:
            runner.steering.grown(grown, nodes * len(request.greedy))
        return proposal
