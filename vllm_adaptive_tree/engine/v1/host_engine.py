"""Model Runner V1 as the engine of a `TreeStep`: trees between two steps, their rows, and the figures of a step."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.engine.common.ranks import accepted_from_rank_0
from vllm_adaptive_tree.engine.metrics.step_figures import StepFigures, by_depth
from vllm_adaptive_tree.engine.targets.checks import step_limit
from vllm_adaptive_tree.engine.v1.drafts import Draft
from vllm_adaptive_tree.engine.v1.limits import Limits
from vllm_adaptive_tree.engine.v1.requests import HostRequests
from vllm_adaptive_tree.engine.v1.scheduling import (
    affordable,
    reasons_without_tree,
    scheduled_draft,
    without_placeholders,
)
from vllm_adaptive_tree.engine.v1.target import Target
from vllm_adaptive_tree.engine.v1.verification import Verification
from vllm_adaptive_tree.proposers.acceptance_table import AcceptanceTable


class Rows(NamedTuple):
    """Rows of a batch, as vLLM prepares them, on the host."""

    scheduled: SchedulerOutput
    counts: list[int]
    """[R]: rows of each request."""
    computed: list[int]
    """[R]: tokens of each request with K/V in the cache."""
    logits_rows: Tensor
    """Row of each of the target's logits."""


class HostEngine:
    """`step.Engine` of a `runner`."""

    def __init__(self, runner: Any):
        self.runner = runner
        self.drafts: dict[str, Draft] = {}
        """Trees that are drafted, and not yet scheduled."""
        self.scheduled_tokens: Mapping[str, list[int]] = {}
        """Draft tokens of this step, as the scheduler has them."""
        self.verified_tokens: Mapping[str, list[int]] = {}
        """Those that are verified."""
        self.fallback_reasons: dict[str, str] = {}
        """Requests that got no tree when the last batch drafted, and why."""
        self.step_reasons: list[str] = []
        """Those of this step, as `StepFigures.fallback_reasons`."""
        self.requests = HostRequests(runner, (), ())
        self.target: Target | None = None
        self.num_dead_rows = self.num_drafted_nodes = 0
        """Numbers since the last metrics read."""

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.drafts.pop(name, None)

    def affordable(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """Scheduler's output with as many nodes as the budget affords in a step with prompts."""
        self.scheduled_tokens = scheduled.scheduled_spec_decode_tokens
        _, full = step_limit(self.runner.scheduler_config)
        scheduled = affordable(without_placeholders(scheduled), self.drafts, self.runner.budget, full=full)
        self.verified_tokens = scheduled.scheduled_spec_decode_tokens
        return scheduled

    def lay_out(self, batch: Rows) -> Verification:
        runner, tokens = self.runner, batch.scheduled.scheduled_spec_decode_tokens
        input_batch = runner.input_batch
        drafts = {name: self.drafts.pop(name, None) for name in batch.scheduled.num_scheduled_tokens}
        row = input_batch.req_id_to_index
        scheduled = {row[name]: scheduled_draft(drafts[name], kept, name) for name, kept in tokens.items()}
        self.step_reasons = reasons_without_tree(
            input_batch.req_ids, tokens, self.scheduled_tokens, drafts, self.fallback_reasons
        )
        starts = np.cumsum([0, *batch.counts[:-1]]).tolist()
        vocabulary = runner.model_config.get_vocab_size()
        verification = Verification(scheduled, starts, batch.counts, batch.computed, vocabulary)
        verification.write_rows(runner.input_ids.np, runner.positions, batch.logits_rows)
        rows = zip(batch.computed, batch.counts, verification.sizes, strict=True)
        roots = [computed + count - 1 - size for computed, count, size in rows]
        self.requests = HostRequests(runner, input_batch.req_ids, roots)
        return verification

    @contextmanager
    def sampling(self, logits: Tensor, verification: Verification, acceptable: Mapping[str, int]) -> Iterator[Target]:
        """Target of a verification, while it is sampled. `acceptable`: as for `Limits`."""
        runner = self.runner
        limits = Limits.of(runner.input_batch, runner.requests, acceptable, verification.levels)
        metadata, forces_greedy = runner.input_batch.sampling_metadata, runner.pair.init_width > 1
        self.target = Target(runner.sampler, metadata, logits, verification, limits, forces_greedy=forces_greedy)
        yield self.target
        self.target.close()

    def agreed(self, verification: Verification, accepted: Accepted) -> Accepted:
        return accepted_from_rank_0(accepted, verification.levels)

    def commit(self, verification: Verification, nodes: Tensor) -> None:
        verification.commit(nodes, self.runner.compilation_config.static_forward_context)

    def observe(self, verification: Verification, accepted: Accepted) -> None:
        runner, (tokens, nodes) = self.runner, accepted
        names = runner.input_batch.req_ids
        if runner.budget is not None:
            runner.budget.verified(verification, accepted)
        if runner.proposer.acceptance is not None:
            learn(runner.proposer.acceptance, verification.drafts, nodes)
        if runner.recorder is not None:
            runner.recorder.see(verification.drafts, [runner.requests[name] for name in names], nodes, self.target)
        if runner.record is not None:
            sizes = verification.sizes
            positions = verification.computed
            runner.record.verified(names, verification.decodes, positions, sizes, nodes, tokens, self._given)

    def _given(self, row: int, start: int, end: int) -> list[int]:
        """Tokens of a request, without those that it was given as embeddings."""
        batch, places = self.runner.input_batch, slice(start, end)
        tokens: list[int] = batch.token_ids_cpu[row, places][batch.is_token_ids[row, places]].tolist()
        return tokens

    def end(self) -> None:
        """Drop what belongs to one step."""
        self.requests, self.target = HostRequests(self.runner, (), ()), None

    def figures(self, verification: Verification) -> StepFigures:
        """Figures of a step, and of all since the last one."""
        dead, drafted = self.num_dead_rows, self.num_drafted_nodes
        self.num_dead_rows = self.num_drafted_nodes = 0
        return replace(
            StepFigures.begun(self.runner.budget, dead=dead),
            seconds=self.runner.clock.take(),
            nodes=by_depth(verification.branches.depth.tolist()) if verification.trees else {},
            drafted=drafted,
            has_lookup_trees=any(draft.from_lookup for draft in verification.drafts.values()),
            rows=verification.sizes,
            fallback_reasons=self.step_reasons,
        )


def learn(table: AcceptanceTable, drafts: Mapping[int, Draft], nodes: Tensor) -> None:
    """Record verified `drafts` by row, and the accepted `nodes` [rows, L]."""
    trees = {row: draft for row, draft in drafts.items() if len(draft.cell)}
    if trees:
        width = max(len(draft.cell) for draft in trees.values())
        cell, parent = np.full((2, len(trees), width), -1)
        for place, draft in enumerate(trees.values()):
            cell[place, : len(draft.cell)], parent[place, : len(draft.cell)] = draft.cell, draft.tree.parents
        table.observe(cell, parent, nodes.numpy()[list(trees)])
