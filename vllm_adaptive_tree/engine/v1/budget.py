"""The batch-wide budget in the engine: what a step cost, what its nodes were worth, how many the next one brings."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_adaptive_tree.budget import Controller, Pauses, Sharpening
from vllm_adaptive_tree.drafters import Frontier
from vllm_adaptive_tree.engine.common.ranks import from_rank_0, number_from_rank_0
from vllm_adaptive_tree.engine.common.steering import Steering
from vllm_adaptive_tree.engine.v1.clock import PhaseClock
from vllm_adaptive_tree.engine.v1.drafts import Draft
from vllm_adaptive_tree.engine.v1.verification import Verification
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE
from vllm_adaptive_tree.trees.tree_batch import EMPTY

Agree = Callable[[Frontier, Tensor], tuple[Frontier, bool]]
"""As in `draft_tree`."""


class BatchBudget:
    """Feeds a `Controller` with the engine's steps. What it decides is rank 0's."""

    def __init__(
        self,
        controller: Controller,
        clock: PhaseClock,
        steering: Steering,
        sharpening: Sharpening | None = None,
    ):
        """`sharpening`: fits the draft temperature of greedy requests."""
        self.sharpening = sharpening
        self.pauses = Pauses()
        self.controller, self.clock, self.steering = controller, clock, steering
        self.by_place = steering.proposer.by_place
        self.started = 0.0
        self.shortened = False
        """Whether the last trees would have grown on, but for the limit on their levels."""

    @property
    def greedy_temperature(self) -> float:
        """Of the law that shapes the trees of greedy requests."""
        return GREEDY_DRAFT_TEMPERATURE if self.sharpening is None else self.sharpening.temperature

    def begin_step(self) -> None:
        self.started = time.perf_counter()

    def beside_prompts(self, drafts: list[Draft], rows: int) -> list[int]:
        """How many nodes of each of these trees to verify in a step that has `rows` other rows, prompts among them."""
        value = pad_sequence([torch.tensor(one.value) for one in drafts], batch_first=True)
        depth = pad_sequence([torch.tensor(one.tree.depths) for one in drafts], batch_first=True)
        greedy = torch.tensor([one.root is not None for one in drafts])
        kept: list[int] = from_rank_0(self.controller.share_beside(value, depth, rows, greedy=greedy)).tolist()
        return kept

    def verified(self, drafts: dict[int, Draft], tokens: Tensor, nodes: Tensor) -> None:
        """The drafts of a step by batch row, and what was emitted: `tokens` [R, L] and the accepted `nodes` [R, L] that
        carried them, -1 behind."""
        paths = nodes.tolist()
        for calibration, greedy in zip(self.controller.calibrations, (False, True), strict=True):
            value: list[float] = []
            depth: list[int] = []
            accepted: list[bool] = []
            for row, draft in drafts.items():
                if (draft.root is not None) == greedy:
                    path = set(paths[row])
                    value += draft.value
                    depth += draft.tree.depths
                    accepted += [node in path for node in range(len(draft.tree))]
            calibration.observe(value, depth, accepted)
        roots = {row: draft.root for row, draft in drafts.items() if draft.root is not None}
        if self.sharpening is not None:
            first = tokens[:, 0].tolist()
            self.sharpening.observe(list(roots.values()), [first[row] for row in roots])

    def drafting(self, requests: Sequence[str], greedy: Sequence[bool]) -> list[bool]:
        """Which requests of this batch draft, if any do."""
        self.controller.begin(greedy)
        if not number_from_rank_0(self.controller.drafts(len(requests))):
            return [False] * len(requests)
        return self.pauses.drafting(requests)

    def limited(self, agree: Agree, trees: int, others: int) -> Agree:
        """The same, but no more levels than pay; `others`: requests that draft nothing."""
        most = number_from_rank_0(self.controller.depth(trees + others))
        self.steering.price(self.controller, trees + others, trees)
        self.shortened, levels = False, 1

        def agreed(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
            nonlocal levels
            levels += 1
            if levels <= most:
                return agree(frontier, growing)
            self.shortened = bool(growing.any())
            return frontier, False

        return agreed

    def cut(
        self,
        requests: Sequence[str],
        drafts: list[Draft],
        proposal: Proposal,
        roots: Sequence[Tensor | None],
        growing: list[float],
        *,
        others: int,
        judged: bool,
    ) -> list[Draft]:
        """What the batch can afford of each tree.

        Args:
            requests: whose trees these are.
            drafts, proposal: the trees, on the host and as tensors.
            roots: the draft's logits [V] at the roots of greedy requests.
            growing: seconds of each draft forward behind the roots'.
            others: requests that drafted nothing.
            judged: its drafting cost what it costs in every step.
        """
        tree, seconds, batch = proposal.tree, self.clock.seconds, len(drafts) + others
        value = tree.log_weight.exp()
        if self.by_place:  # a drawn token must not decide on its own cut
            value = (1 / torch.arange(1, 1 + value.shape[1])).expand(value.shape)
        value = value.masked_fill(tree.tokens == EMPTY, 0.0)
        greedy = torch.tensor([one is not None for one in roots])
        choosing = seconds["tree"] / (1 + len(growing))  # of each level, the roots' included
        for one in growing:
            self.controller.drafted(batch, one + choosing)
        spent = seconds["draft"] + seconds["tree"]
        kept = from_rank_0(
            self.controller.share(
                value, tree.depth, spent, greedy=greedy, others=others, levels=len(growing), judged=judged
            )
        ).tolist()
        if self.controller.most is None:
            self.pauses.observe(requests, kept)
        return [
            one.worth(own, root, min(count, len(one.tree)))
            for one, count, own, root in zip(drafts, kept, value.tolist(), roots, strict=True)
        ]

    def end_step(self, step: Verification) -> None:
        seconds = self.clock.seconds
        elsewhere = time.perf_counter() - self.started - sum(seconds[name] for name in ("verify", "draft", "tree"))
        self.controller.observe(
            sum(step.row_count), sum(step.computed), seconds["verify"], elsewhere, requests=len(step.row_count)
        )
