"""The batch-wide budget in the engine: what a step cost, what its nodes were worth, how many the next one brings."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.budget import Controller
from vllm_adaptive_tree.engine.clock import PhaseClock
from vllm_adaptive_tree.engine.drafts import Draft
from vllm_adaptive_tree.engine.ranks import from_rank_0, number_from_rank_0
from vllm_adaptive_tree.engine.verification import Verification
from vllm_adaptive_tree.proposers import Frontier, Proposal, StaticTree
from vllm_adaptive_tree.trees.tree_batch import EMPTY

Agree = Callable[[Frontier, Tensor], tuple[Frontier, bool]]
"""As in `draft_tree`."""


class BatchBudget:
    """Feeds a `Controller` with the engine's steps. What it decides is rank 0's."""

    def __init__(self, controller: Controller, proposer: Any, clock: PhaseClock, *, steers: bool = False):
        """`steers`: the proposer's threshold is the controller's."""
        self.controller, self.proposer, self.clock, self.steers = controller, proposer, clock, steers
        self.by_place = isinstance(proposer, StaticTree) and proposer.kind != "one_hot"
        self.started = 0.0
        self.taken = (0.0, 0.0)

    def begin_step(self) -> None:
        self.started = time.perf_counter()

    def verified(self, drafts: dict[int, Draft], nodes: Tensor) -> None:
        """The drafts of a step by batch row, and the nodes [R, L] that were accepted, -1 behind."""
        value, depth, accepted = [], [], []
        paths = nodes.tolist()
        for row, draft in drafts.items():
            path = set(paths[row])
            value += draft.value
            depth += draft.tree.depths
            accepted += [node in path for node in range(len(draft.tree))]
        self.controller.calibration.observe(value, depth, accepted)

    def take(self) -> tuple[float, float]:
        """Accepted nodes that were expected, and those observed, since the last call."""
        calibration = self.controller.calibration
        now = calibration.predicted, calibration.observed
        taken, self.taken = (now[0] - self.taken[0], now[1] - self.taken[1]), now
        return taken

    def drafts(self, requests: int) -> bool:
        """Whether this batch drafts at all."""
        return bool(number_from_rank_0(self.controller.drafts(requests)))

    def limited(self, agree: Agree, requests: int) -> Agree:
        """The same, but no more levels than pay."""
        most = number_from_rank_0(self.controller.depth(requests))
        if self.steers:
            self.proposer.threshold = self.controller.threshold(requests)
        levels = 1

        def agreed(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
            nonlocal levels
            levels += 1
            return agree(frontier, growing) if levels <= most else (frontier, False)

        return agreed

    def cut(self, drafts: list[Draft], proposal: Proposal, growing: list[float], *, judged: bool) -> list[Draft]:
        """What the batch can afford of each tree.

        Args:
            drafts, proposal: the trees, on the host and as tensors.
            growing: seconds of each draft forward behind the roots'.
            judged: its drafting cost what it costs in every step.
        """
        tree, seconds = proposal.tree, self.clock.seconds
        value = tree.log_weight.exp()
        if self.by_place:  # a drawn token must not decide on its own cut
            value = (1 / torch.arange(1, 1 + value.shape[1])).expand(value.shape)
        value = value.masked_fill(tree.tokens == EMPTY, 0.0)
        choosing = seconds["tree"] / (1 + len(growing))  # of each level, the roots' included
        for one in growing:
            self.controller.drafted(len(drafts), one + choosing)
        spent = seconds["draft"] + seconds["tree"]
        kept = from_rank_0(self.controller.share(value, tree.depth, spent, levels=len(growing), judged=judged))
        cut = (
            one.prefix(count) if count < len(one.tree) else one
            for one, count in zip(drafts, kept.tolist(), strict=True)
        )
        return [replace(one, value=own[: len(one.tree)]) for one, own in zip(cut, value.tolist(), strict=True)]

    def end_step(self, step: Verification) -> None:
        seconds = self.clock.seconds
        elsewhere = time.perf_counter() - self.started - sum(seconds[name] for name in ("verify", "draft", "tree"))
        self.controller.observe(sum(step.row_count), seconds["verify"], elsewhere)
