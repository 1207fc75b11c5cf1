"""The batch-wide budget without a look at the device: decided on the host, from figures of past steps."""

import time
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.budget import Controller, Sharpening
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE
from vllm_adaptive_tree.trees import TreeBatch

ALL = 1 << 30
SETTLED = 2
"""Steps that have drafted nothing before the time of one is that of a step without drafts: the device is behind."""


class BatchBudget:
    """How many nodes the next verification has, and how many levels this step drafts.

    Which nodes those are, the device decides (`compaction.py`). Their number is chosen from the trees of an earlier
    step, so it asks nothing of a token that it would cut. What a step takes is the time between two steps on the host,
    which in the long run is the device's.
    """

    def __init__(self, most: int = ALL):
        """`most`: nodes of every batch; all until there is a `controller`."""
        self.most = most
        self.may_rest = most == ALL
        self.controller: Controller | None = None
        self.sharpening: Sharpening | None = None
        """Fits the draft temperature of greedy requests."""
        self.live = True
        """Whether costs follow the steps; ranks that must agree on every number keep to those of the start."""
        self.returning = AsyncReadback()
        self.value = self.depth = torch.zeros(0, 1)  # [R, N] of an earlier step
        self.greedy = torch.zeros(0, dtype=torch.bool)  # [R]: whose trees those were
        self.rests = False
        self.started = self.spent = 0.0
        self.drafting = 0, 0
        """Requests and draft forwards of the last step."""
        self.rested = 0
        """Steps in a row that have drafted nothing."""

    @property
    def greedy_temperature(self) -> float:
        """Of the law that shapes the trees of greedy requests."""
        return GREEDY_DRAFT_TEMPERATURE if self.sharpening is None else self.sharpening.temperature

    def levels(self, greedy: np.ndarray) -> int:
        """The most levels of this step's trees, of requests that are `greedy` [R] or not; 0: they rest."""
        self.returning.next_step()
        if self.controller is None:
            return ALL
        self.controller.begin(greedy.tolist())
        self.rests = not self.controller.drafts(len(greedy))
        return 0 if self.rests else self.controller.depth(len(greedy))

    def drafted(self, tree: TreeBatch, greedy: np.ndarray, *, by_place: bool) -> None:
        """Trees of this step; `by_place`: their nodes count by their place in the list."""
        if self.controller is not None:
            value = place_values(tree) if by_place else tree.log_weight.exp()
            value = value.masked_fill(~tree.valid, 0.0)
            figures = torch.stack([value, tree.depth.to(value.dtype)])
            self.returning.send(figures, partial(self._know, torch.from_numpy(greedy)))

    def verified(
        self, tree: TreeBatch, accepted: Accepted, greedy: np.ndarray, order: Tensor | None, *, by_place: bool
    ) -> None:
        """`order` [R, N]: places in generation order, if those of the nodes are others."""
        if self.controller is not None:
            value = place_values(tree) if by_place else tree.log_weight.exp()
            if by_place and order is not None:
                value = value.gather(1, order)
            place = torch.arange(tree.tokens.shape[1], device=value.device)
            hit = (accepted.nodes[:, :, None] == place).any(1)
            depth = torch.where(tree.valid, tree.depth, 0)
            figures = torch.stack([value, depth.to(value.dtype), hit.to(value.dtype)])
            self.returning.send(figures, partial(self._learn, torch.from_numpy(greedy)))

    def sharpen(self, roots: Tensor, token: Tensor, among: Tensor) -> None:
        """Behind roots with the draft's logits [R, V] the target took `token` [R]; `among` [R]: greedy requests that
        had a tree."""
        sharpening = self.sharpening
        if sharpening is not None:
            figures = sharpening.measured(roots, token, among)
            self.returning.send(figures, lambda found: sharpening.learn(*found.tolist()))

    def decide(self, requests: int, rows: int, context: int, levels: int, *, usual: bool, missed: int = 0) -> None:
        """At the end of a step.

        Args:
            rows, context: of its verification; tokens in the cache of all requests.
            levels: draft forwards behind the roots'.
            usual: it read no prompts, and no gaps.
            missed: tokens that the draft read of gaps.
        """
        controller = self.controller
        if controller is None:
            return
        now = time.perf_counter()
        spent = 0.0 if self.rests else (1 + levels) * controller.level(requests)
        if missed and controller.draft is not None:
            spent += controller.draft.cost(missed)
        if self.live and usual and self.started:
            self._follow(requests, rows, context, now - self.started)
        self.started, self.spent = (now if usual else 0.0), spent
        self.drafting = requests, 0 if self.rests else 1 + levels
        self.rested = self.rested + 1 if self.rests and usual else 0
        if self.rests:
            self.most = 0
        elif len(self.value):
            value, depth = self.value[:requests], self.depth[:requests]
            others = requests - len(value)
            kept = controller.share(
                value, depth, spent, greedy=self.greedy[:requests], others=others, levels=levels, judged=usual
            )
            self.most = int(kept.sum())

    def _follow(self, requests: int, rows: int, context: int, seconds: float) -> None:
        """The time since the last step: of its drafting and of this verification, each as far off as both together."""
        controller, (drafting, levels) = self.controller, self.drafting
        assert controller is not None
        verify = controller.verify.cost(rows) + context * controller.costs.context
        share = self.spent / (self.spent + verify)
        alone = self.rests and self.rested >= SETTLED
        controller.observe(rows, context, seconds * (1 - share), 0.0, requests=requests if alone else 0)
        if levels:
            controller.drafted(drafting, seconds * share / levels)

    def _know(self, greedy: Tensor, figures: Tensor) -> None:
        self.value, self.depth, self.greedy = figures[0], figures[1].long(), greedy

    def _learn(self, greedy: Tensor, figures: Tensor) -> None:
        assert self.controller is not None
        for calibration, rows in zip(self.controller.calibrations, (~greedy, greedy), strict=True):
            value, depth, hit = figures[:, (figures[1] > 0) & rows[:, None]]
            calibration.observe(value.tolist(), depth.long().tolist(), (hit > 0).tolist())


def place_values(tree: TreeBatch) -> Tensor:
    """[R, N] for drawn children of a fixed shape, whose tokens must not decide on their own cut."""
    place = torch.arange(1, 1 + tree.tokens.shape[1], device=tree.tokens.device)
    return (1 / place).expand(tree.tokens.shape)
