"""The budget on Model Runner V1: its figures are those of this step, by the clock."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_adaptive_tree.budget import Budget
from vllm_adaptive_tree.drafters import Frontier
from vllm_adaptive_tree.engine.common.batch_budget import BatchBudget
from vllm_adaptive_tree.engine.common.ranks import from_rank_0, number_from_rank_0
from vllm_adaptive_tree.engine.common.steering import Steering
from vllm_adaptive_tree.engine.v1.clock import PhaseClock
from vllm_adaptive_tree.engine.v1.drafts import Draft
from vllm_adaptive_tree.engine.v1.verification import Verification
from vllm_adaptive_tree.proposers import Proposal

Agree = Callable[[Frontier, Tensor], tuple[Frontier, bool]]
"""As in `draft_tree`."""


class HostBudget(BatchBudget):
    """What it decides is rank 0's."""

    def __init__(self, budget: Budget, steering: Steering, clock: PhaseClock):
        super().__init__(budget, steering)
        self.clock, self.started = clock, 0.0
        self.levels = 0
        """Most levels of this step's trees; 0: the draft rests."""
        self.looked = False
        """Whether a look-up has made trees in this step, in which the draft rests."""
        self.limited = False
        """Whether the last trees would have grown on, but for the limit on their levels."""
        self.drafting = self.reading = 0.0
        """Seconds of this step's drafting, but for its first forward, and of the prompts that this forward read."""

    @property
    def verifying(self) -> int:
        return self.budget.verifying if self.levels or self.looked else 0

    def begin_step(self) -> None:
        self.started, self.drafting, self.reading = time.perf_counter(), 0.0, 0.0
        self.looked = False

    def with_prompts(self, drafts: list[Draft], rows: int) -> list[int]:
        """How many nodes of each of these trees to verify in a step that has `rows` other rows, prompts among them.

        Prompts have to be read in any case; with them a row often costs more than in other steps. A tree that waited
        for a step is kept whole: meanwhile it has had a say in the price.
        """
        value = pad_sequence([torch.tensor(one.value) for one in drafts], batch_first=True)
        depth = pad_sequence([torch.tensor(one.tree.depths) for one in drafts], batch_first=True)
        greedy = torch.tensor([one.greedy for one in drafts])
        kept = self.budget.share(value, depth, greedy, rows=rows)
        waited = torch.tensor([one.price != self.budget.plan.price for one in drafts])
        counts: list[int] = from_rank_0(torch.where(waited, (depth > 0).sum(1), kept)).tolist()
        return counts

    def verified(self, drafts: dict[int, Draft], tokens: Tensor, nodes: Tensor) -> None:
        """The drafts of a step by batch row, and what was emitted: `tokens` [R, L] and the accepted `nodes` [R, L] that
        carried them, -1 after them."""
        value: list[float] = []
        depth: list[int] = []
        accepted: list[bool] = []
        greedy: list[bool] = []
        paths, first = nodes.tolist(), tokens[:, 0].tolist()
        for row, draft in drafts.items():
            value += draft.value
            depth += draft.tree.depths
            accepted += [node in paths[row] for node in range(len(draft.tree))]
            greedy += [draft.greedy] * len(draft.tree)
        hit, certain = (torch.tensor(one, dtype=torch.bool) for one in (accepted, greedy))
        self.budget.verified(torch.tensor(value), torch.tensor(depth), hit, certain)
        if self.temperature is not None:
            roots = {row: draft.root for row, draft in drafts.items() if draft.root is not None}
            self.temperature.observe(list(roots.values()), [first[row] for row in roots])

    def drafts(self, greedy: Sequence[bool]) -> bool:
        """Whether a step of these requests drafts."""
        self.levels = number_from_rank_0(self.begin(greedy).levels)
        return self.levels > 0

    def agreed(self, agree: Agree, trees: int, others: int) -> Agree:
        """`agree` for no more levels than pay; `others`: requests that draft nothing."""
        self.steer(trees + others, trees)
        self.limited, levels = False, 1

        def agreed(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
            nonlocal levels
            levels += 1
            if levels <= self.levels:
                return agree(frontier, growing)
            self.limited = bool(growing.any())
            return frontier, False

        return agreed

    def cut(
        self,
        drafts: list[Draft],
        proposal: Proposal,
        greedy: Tensor,
        roots: Sequence[Tensor | None],
        growing: list[float],
        *,
        level: Tensor | None,
        looking: float,
        others: int,
        prompts: bool,
        gaps: bool,
    ) -> list[Draft]:
        """What the batch can afford of each tree.

        Args:
            drafts, proposal: the trees, on the host and as tensors.
            greedy: [R] bool.
            roots: the draft's logits [V] at the roots of greedy requests; none while it rests.
            growing: seconds of each draft forward after the roots'.
            level: [R, N] as `Planner.observe_trees` takes it.
            looking: seconds of the look-up.
            others: requests that drafted nothing.
            prompts, gaps: whether the roots' forward read prompts, or what the draft has missed.
        """
        tree, seconds, batch = proposal.tree, self.clock.seconds, len(drafts) + others
        value = self.values(tree)
        self.budget.observe_trees(value, tree.depth, greedy, self.budget.plan, level=level)
        kept = from_rank_0(self.budget.share(value, tree.depth, greedy, rows=others)).tolist()
        self.looked = not self.levels
        if self.levels:
            choosing = (seconds["tree"] - looking) / (1 + len(growing))  # of each level, the roots' included
            for one in growing:
                self.budget.observe_level(batch, one + choosing)
            usual, first = self.budget.level(batch), seconds["draft"] + choosing - sum(growing)
            self.drafting = seconds["draft"] + seconds["tree"] - looking - (0 if prompts or gaps else first - usual)
            self.reading = max(0.0, first - usual) if prompts and not gaps else 0.0
        return [
            one._replace(value=own, greedy=certain, root=root, price=self.budget.plan.price).prefix(
                min(count, len(one.tree))
            )
            for one, count, own, certain, root in zip(drafts, kept, value.tolist(), greedy.tolist(), roots, strict=True)
        ]

    def end_step(self, step: Verification) -> None:
        seconds, rows = self.clock.seconds, sum(step.row_count)
        plain = self.looked or rows == len(step.row_count)
        drafted = True if seconds["tree"] and not self.looked else False if plain else None
        drafting = self.drafting if drafted else seconds["draft"]
        rest = time.perf_counter() - self.started - seconds["verify"] - drafting
        self.budget.observe_step(
            rows, sum(step.computed), seconds["verify"], rest, drafted=drafted, reading=self.reading
        )
