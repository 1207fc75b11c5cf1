"""The budget on Model Runner V2: decided on the host without a look at the device, from figures of past steps."""

import time
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.budget import Budget, Plan
from vllm_adaptive_tree.engine.common.batch_budget import BatchBudget
from vllm_adaptive_tree.engine.common.steering import Steering
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
from vllm_adaptive_tree.trees import TreeBatch

SETTLED = 2
"""Steps that have drafted nothing before the time of one is that of a step without drafts: the device is late."""


class DeviceBudget(BatchBudget):
    """How many nodes the next verification has, and how many levels this step drafts.

    Which nodes those are, the device decides (`node_selection.py`). Their number is chosen from the trees of an earlier
    step, so it asks nothing of a token that it would cut. What a step takes is the time between two steps on the host,
    which in the long run is the device's.
    """

    def __init__(self, budget: Budget, steering: Steering, *, learns: bool):
        """`learns`: the budget is not fixed; what it decides follows from past steps."""
        super().__init__(budget, steering)
        self.learns, self.nodes = learns, budget.most
        self.live = True
        """Whether costs follow the steps; ranks that must agree on every number keep to those of the start."""
        self.readback = AsyncReadback()
        self.value = self.depth = torch.zeros(0, 1)  # [R, N] of an earlier step
        self.greedy = torch.zeros(0, dtype=torch.bool)  # [R]: whose trees those were
        self.started = self.spent = 0.0
        self.drafting = 0, 0
        """Requests and draft forwards of the last step."""
        self.rested = 0
        """Steps in a row that have drafted nothing."""

    @property
    def verifying(self) -> int | None:
        return self.nodes

    def begin_step(self, greedy: np.ndarray) -> int:
        """The most levels of the trees of requests that are `greedy` [R] or not; 0: nothing is drafted."""
        self.readback.next_step()
        return self.begin(greedy.tolist()).levels

    def drafted(self, tree: TreeBatch, greedy: np.ndarray, level: Tensor | None) -> None:
        """Trees of this step; `level` [R, N] as `Planner.observe_trees` takes it."""
        if self.learns:
            value = self.values(tree)
            numbers = (tree.depth,) if level is None else (tree.depth, level)
            figures = torch.stack([value, *(one.to(value.dtype) for one in numbers)])
            self.readback.send(figures, partial(self._know, torch.from_numpy(greedy), self.budget.plan))

    def verified(self, tree: TreeBatch, accepted: Accepted, greedy: np.ndarray, order: Tensor | None) -> None:
        """`order` [R, N]: places in generation order, if those of the nodes are others."""
        if self.learns:
            value = self.values(tree, order)
            place = torch.arange(tree.tokens.shape[1], device=value.device)
            hit = (accepted.nodes[:, :, None] == place).any(1)
            depth = torch.where(tree.valid, tree.depth, 0)
            figures = torch.stack([value, depth.to(value.dtype), hit.to(value.dtype)])
            self.readback.send(figures, partial(self._learn, torch.from_numpy(greedy)))

    def fit(self, roots: Tensor, token: Tensor, among: Tensor) -> None:
        """After roots with the draft's logits [R, V] the target took `token` [R]; `among` [R]: greedy requests that
        had a tree."""
        temperature = self.temperature
        if temperature is not None:
            figures = temperature.measured(roots, token, among)
            self.readback.send(figures, lambda found: temperature.learn(*found.tolist()))

    def end_step(self, requests: int, rows: int, context: int, forwards: int, *, usual: bool, trees: bool) -> None:
        """Decide how many nodes the next verification has.

        Args:
            rows, context: of this step's verification; tokens in the cache of all requests.
            forwards: of the draft after the roots'.
            usual: it read no prompts, and nothing that the draft had missed.
            trees: it has left some, of the draft or of a look-up.
        """
        if not self.learns:
            return
        now, rests = time.perf_counter(), self.budget.plan.levels == 0
        levels = 0 if rests else 1 + forwards
        if self.live and usual and self.started:
            self._follow(requests, rows, context, now - self.started, rests=rests)
        self.started = now if usual else 0.0
        self.spent = levels * self.budget.level(requests)
        self.drafting = requests, levels
        self.rested = self.rested + 1 if rests and usual else 0
        if not trees or (rests and not len(self.value)):
            self.nodes = 0
        elif len(self.value):
            greedy = self.greedy[:requests]
            kept = self.budget.share(self.value[:requests], self.depth[:requests], greedy, rows=requests - len(greedy))
            self.nodes = int(kept.sum())

    def _follow(self, requests: int, rows: int, context: int, seconds: float, *, rests: bool) -> None:
        """The time since the last step: of its drafting and of this verification, each as far off as both together."""
        batch, levels = self.drafting
        verify = self.budget.costs.verify.cost(rows) + context * self.budget.costs.context
        drafting = self.spent / (self.spent + verify)
        if levels or self.rested >= SETTLED:
            self.budget.observe_step(rows, context, seconds * (1 - drafting), 0.0, drafted=not rests)
        if levels:
            self.budget.observe_level(batch, seconds * drafting / levels)

    def _know(self, greedy: Tensor, plan: Plan, figures: Tensor) -> None:
        (self.value, depth, *level), self.greedy = figures, greedy
        self.depth = depth.long()
        self.budget.observe_trees(self.value, self.depth, greedy, plan, level=level[0].long() if level else None)

    def _learn(self, greedy: Tensor, figures: Tensor) -> None:
        value, depth, hit = figures
        known = depth > 0
        rows = greedy[:, None].expand(known.shape)[known]
        self.budget.verified(value[known], depth[known].long(), hit[known] > 0, rows)
