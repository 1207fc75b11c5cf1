"""Budget on Model Runner V1: it learns from the figures of this step, by the clock."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.budget import Budget, Turns
from vllm_adaptive_tree.drafters import Frontier
from vllm_adaptive_tree.engine.common.batch_budget import BatchBudget
from vllm_adaptive_tree.engine.common.ranks import from_rank_0, number_from_rank_0
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.engine.v1.clock import PhaseClock
from vllm_adaptive_tree.engine.v1.drafts import Draft
from vllm_adaptive_tree.engine.v1.verification import Verification
from vllm_adaptive_tree.proposers import Proposal

Agree = Callable[[Frontier, Tensor], tuple[Frontier, bool]]
"""Agreement of ranks on a frontier, as in `draft_tree`."""


class HostBudget(BatchBudget):
    """Budget on the host, whose decisions are rank 0's."""

    def __init__(self, budget: Budget, steering: ThresholdController, clock: PhaseClock):
        super().__init__(budget, steering)
        self.clock, self.started = clock, 0.0
        self.levels = 0
        """Most levels of this step's trees; 0: the draft rests."""
        self.few, self.turns = 0, Turns()
        """As in the plan; the requests of trials."""
        self.has_lookup_trees = False
        """True if a look-up alone has made the trees of this step, none or some."""
        self.limited = False
        """True if only the limit on their levels has ended the growth of the last trees."""
        self.draft_seconds = self.prompt_seconds = self.planning_seconds = 0.0
        """Seconds of this step's drafting, but for its first forward, of the prompts that this forward read, and of
        planning: a plan serves many steps, but a trial makes one in each."""

    @property
    def verifying(self) -> int:
        return self.budget.verifying if self.levels or self.has_lookup_trees else 0

    def begin_step(self) -> None:
        self.started = time.perf_counter()
        self.draft_seconds = self.prompt_seconds = self.planning_seconds = 0.0
        self.has_lookup_trees = False

    def with_prompts(self, drafts: list[Draft], rows: int, *, full: int) -> list[int]:
        """Number of nodes of each of these trees to verify in a step that has `rows` other rows, prompts among them.

        Prompts are read in any case. A tree that waited for another plan is kept whole: that plan has learnt from it.
        So sampled trees do not know `rows`, which are what they leave of a `full` step.
        """
        value = pad_sequence([torch.tensor(draft.value) for draft in drafts], batch_first=True)
        depth = pad_sequence([torch.tensor(draft.depth) for draft in drafts], batch_first=True)
        greedy = np.array([draft.greedy for draft in drafts])
        kept = torch.from_numpy(self.budget.share(value.numpy(), depth.numpy(), greedy, rows=rows, full=full))
        waited = torch.tensor([draft.plan is not self.budget.plan for draft in drafts])
        counts: list[int] = from_rank_0(torch.where(waited, (depth != 0).sum(1), kept)).tolist()
        return counts

    def verified(self, step: Verification, accepted: Accepted) -> None:
        """Learn from a verification: [R, L] tokens that were emitted, and the nodes that carried them."""
        drafts = step.drafts
        if not drafts:
            return
        on_path = np.zeros((len(step.row_start), 1 + max(step.sizes)), dtype=bool)
        on_path[np.arange(len(on_path))[:, None], 1 + accepted.nodes.numpy()] = True  # -1, and the root: the first
        value, depth = (
            np.concatenate(part) for part in zip(*((d.value, d.depth) for d in drafts.values()), strict=True)
        )
        greedy = np.array([draft.greedy for draft in drafts.values()]).repeat(np.diff(step.branches.start))
        hit = on_path[step.row, 1 + step.node]
        self.budget.verified(value, depth, hit, greedy)
        if self.temperature is not None:
            roots = {row: draft.root for row, draft in drafts.items() if draft.root is not None}
            self.temperature.observe(list(roots.values()), accepted.tokens[list(roots), 0].tolist())

    def begin_levels(self, greedy: Sequence[bool]) -> int:
        """Most levels of the trees of these requests; 0: the draft rests."""
        started = time.perf_counter()
        plan = self.begin(greedy)
        self.planning_seconds = time.perf_counter() - started
        self.levels = number_from_rank_0(plan.levels)
        self.few = number_from_rank_0(plan.few) if self.levels else 0
        return self.levels

    def drafting(self, greedy: Sequence[bool]) -> list[bool]:
        """True for each of these requests that drafts in this step."""
        return self.turns.chosen(greedy, self.few)

    def agreed(self, agree: Agree, trees: int, num_without_tree: int) -> Agree:
        """`agree` for no more levels than pay; `num_without_tree`: requests that draft nothing."""
        self.steer(self._rows(trees, num_without_tree), trees)
        self.limited, levels = False, 1

        def agreed(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
            nonlocal levels
            levels += 1
            if levels <= self.levels:
                return agree(frontier, growing)
            self.limited = bool(growing.any())
            return frontier, False

        return agreed

    def look_up_pays(self, greedy: Sequence[bool], nodes: int, num_without_tree: int) -> bool:
        """As `Budget.look_up_pays`. If not, a look-up has no trees in this step."""
        pays = bool(number_from_rank_0(int(self.budget.look_up_pays(greedy, nodes, rows=num_without_tree))))
        self.has_lookup_trees = True
        if not pays:
            self.budget.verifying = 0
        return pays

    def found_nothing(self, greedy: Sequence[bool], nodes: int) -> None:
        """Learn that a look-up alone has none of so many `nodes` for any of these requests."""
        nothing = np.zeros((len(greedy), nodes))
        depth = nothing.astype(np.int64)
        self.budget.observe_trees(nothing, depth, greedy, self.budget.plan, level=depth)
        self.budget.verifying, self.has_lookup_trees = 0, True

    def cut(
        self,
        drafts: list[Draft],
        proposal: Proposal,
        greedy: Tensor,
        roots: Sequence[Tensor | None],
        growing: list[tuple[int, float]],
        *,
        level: Tensor | None,
        looking: float,
        num_without_tree: int,
        prompts: bool,
        gaps: bool,
    ) -> list[Draft]:
        """Cut each tree to what the batch can afford.

        Args:
            drafts, proposal: the trees, on the host and as tensors.
            greedy: [R] bool.
            roots: the draft's logits [V] at the roots of greedy requests; none while it rests.
            growing: rows and seconds of each draft forward after the roots'.
            level: [R, N] as `Planner.observe_trees` takes it.
            looking: seconds of the look-up.
            num_without_tree: requests that drafted nothing.
            prompts, gaps: True if the roots' forward read prompts, or tokens that the draft had skipped.
        """
        tree, seconds, batch = proposal.tree, self.clock.seconds, self._rows(len(drafts), num_without_tree)
        value, depth, kinds = (
            self.values(tree.log_weight.numpy(), tree.valid.numpy(), None),
            tree.depth.numpy(),
            greedy.numpy(),
        )
        levels = None if level is None else level.numpy()
        if levels is not None:
            depth = np.where(levels == 0, -depth, depth)
        self.budget.observe_trees(value, depth, kinds, self.budget.plan, level=levels)
        kept = torch.from_numpy(self.budget.share(value, depth, kinds, rows=num_without_tree))
        counts = from_rank_0(kept).tolist()
        self.has_lookup_trees = not self.levels
        if self.levels:
            choosing = (seconds["tree"] - looking) / (1 + len(growing))  # of each level, the roots' included
            for rows, forward in growing:
                self.budget.observe_level(batch, rows, forward + choosing)
            grown = sum(forward for _, forward in growing)
            usual, first = self.budget.level(batch), seconds["draft"] + choosing - grown
            self.draft_seconds = (
                seconds["draft"] + seconds["tree"] - looking - (0 if prompts or gaps else first - usual)
            )
            self.prompt_seconds = max(0.0, first - usual) if prompts and not gaps else 0.0
        return [
            draft.prefix(count)._replace(
                value=own[:count], depth=deep[:count], greedy=certain, root=root, plan=self.budget.plan
            )
            if len(draft.tree)
            else draft
            for draft, count, own, deep, certain, root in zip(
                drafts, counts, value, depth, greedy.tolist(), roots, strict=True
            )
        ]

    def _rows(self, trees: int, num_without_tree: int) -> int:
        """Number of requests whose draft level is timed: the batch's, and in a trial those that draft."""
        return trees if self.few else trees + num_without_tree

    def end_step(self, step: Verification) -> None:
        seconds, rows = self.clock.seconds, sum(step.row_count)
        plain = self.has_lookup_trees or rows == len(step.row_count)
        drafted = True if seconds["tree"] and not self.has_lookup_trees else False if plain else None
        drafting = self.draft_seconds if drafted else seconds["draft"]
        verifying = seconds["verify"] + seconds["accept"] + seconds["commit"]  # each grows with the rows
        rest = time.perf_counter() - self.started - verifying - drafting - self.planning_seconds
        context = float(np.average(step.computed, weights=step.row_count))
        self.budget.observe_step(rows, context, verifying, rest, drafted=drafted, reading=self.prompt_seconds)
