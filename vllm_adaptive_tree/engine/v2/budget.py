"""Budget on Model Runner V2: decided on the host from figures of past steps, without a device sync."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.budget import Budget, DraftTemperature, Plan, Planner, Turns
from vllm_adaptive_tree.engine.common.batch_budget import BatchBudget
from vllm_adaptive_tree.engine.common.ranks import is_rank_0, object_from_rank_0
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.engine.v2.phase_times import DraftMarks, PhaseTimes, passed, reached, seconds
from vllm_adaptive_tree.engine.v2.readback import AsyncReadback
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE
from vllm_adaptive_tree.trees import TreeBatch

LAG = 2
"""Steps by which a step's times are read late: the device lags the host."""
EVERY = 32
"""Steps whose times ranks learn at once: their hosts meet for them."""


class StepTimes(NamedTuple):
    """Seconds of a step: all of it, its drafting, and in that the growth of trees."""

    step: float
    draft: float
    growth: float


class StepCost(NamedTuple):
    """A step, between the begin of its verification and that of the next."""

    requests: int
    rows: int  # of its verification
    context: float  # tokens in the cache before a row, in the mean
    levels: int  # draft levels, the roots' among them
    begin: Any  # marks of `PhaseTimes`
    end: Any = None
    draft: DraftMarks | None = None

    def times(self) -> StepTimes:
        """Its times, once the device has passed its end, which this waits for."""
        reached(self.end)
        return StepTimes(seconds(self.begin, self.end), *((0.0, 0.0) if self.draft is None else self.draft.seconds()))


def level_seconds(growth: float, levels: int) -> float | None:
    """Seconds of a draft level, forward and choice of nodes, of trees with so many; None: they have one, that of the
    roots, of whose time only the logits and the choice are in the growth."""
    return growth / (levels - 1) if levels > 1 else None


class DeviceBudget(BatchBudget):
    """Number of nodes of the next verification, and number of levels that this step drafts.

    The device selects the nodes (`node_selection.py`). Their number is chosen from the trees of an earlier step, so it
    does not depend on a token that it would cut. Costs follow the device's own times: of a step, and of its draft.
    """

    def __init__(
        self,
        budget: Budget,
        steering: ThresholdController,
        times: PhaseTimes,
        *,
        learns: bool,
        quotas: Sequence[int] | None = None,
    ):
        """
        Args:
            learns: True if the budget is not fixed; its decisions then follow from past steps.
            quotas: nodes of a tree that the scheduler lets be verified, by the number of requests; None: all.
        """
        super().__init__(budget, steering)
        self.quotas = quotas
        self.times = times
        self.learns, self.nodes = learns, budget.most
        self.alone = True
        """False if ranks must agree on every number: they take rank 0's times, and its temperature."""
        self.temperature_of_ranks = GREEDY_DRAFT_TEMPERATURE
        self.readback = AsyncReadback()
        self.value = self.depth = np.zeros((0, 1))  # [R, N] of an earlier step
        self.greedy = np.zeros(0, dtype=bool)  # [R]: greedy requests among those of these trees
        self.few, self.trees = 0, 0  # as in the plan; trees of this step
        self.turns, self.trials = Turns(), 0
        self.last: StepCost | None = None
        """The last step, if its times say what one costs."""
        self.timed = deque[StepCost]()

    def begin_learning(self, planner: Planner, temperature: DraftTemperature | None, *, alone: bool) -> None:
        """Begin to plan, with `alone` as the attribute."""
        self.budget, self.learns, self.alone = planner, True, alone
        self.temperature = temperature
        self._learn([])

    @property
    def greedy_temperature(self) -> float:
        return super().greedy_temperature if self.alone else self.temperature_of_ranks

    @property
    def verifying(self) -> int | None:
        return self.nodes

    def begin_step(self, greedy: np.ndarray) -> int:
        """Most levels of the trees of requests that are `greedy` [R] or not; 0: nothing is drafted."""
        self.readback.next_step()
        if steps := self._timed_steps():
            self._learn(steps)
        plan = self.begin(greedy.tolist())
        few = plan.few if plan.levels else 0
        self.trials += bool(few and not self.few)
        self.few, self.trees = few, len(greedy)
        return plan.levels

    def drafting(self, greedy: np.ndarray) -> np.ndarray | None:
        """[R] bool: requests of this step that draft; None: all. A trial keeps to its own, which have caught up."""
        if not self.few:
            return None
        self.turns.turn = self.trials
        drafting = np.array(self.turns.chosen(greedy.tolist(), self.few))
        self.trees = int(drafting.sum())
        return drafting

    def drafted(
        self, tree: TreeBatch, greedy: np.ndarray, level: Tensor | None, drafting: np.ndarray | None = None
    ) -> None:
        """Note the trees of this step; `level` [R, N] as `Planner.observe_trees` takes it; `drafting` [R]: False for
        requests without one."""
        if self.learns:
            parts = (tree.log_weight, tree.tokens, tree.depth, *(() if level is None else (level,)))
            callback = partial(self._on_trees, greedy, drafting, self.budget.plan, tree.tokens.shape[1])
            self.readback.send(torch.cat(parts, 1), callback)

    def verified(self, tree: TreeBatch, accepted: Accepted, greedy: np.ndarray, order: Tensor | None) -> None:
        """Learn from a verification. `order` [R, N]: places in generation order, if the nodes are in another."""
        if self.learns:
            weight = order if self.by_place and order is not None else tree.log_weight
            callback = partial(self._on_verified, greedy, weight is order, tree.tokens.shape[1])
            self.readback.send(torch.cat([weight, tree.tokens, tree.depth, accepted.nodes], 1), callback)

    def fit(self, roots: Tensor, token: Tensor, selected: Tensor) -> None:
        """Fit the temperature to roots with the draft's logits [R, V] after which the target took `token` [R];
        `selected` [R]: greedy requests that had a tree."""
        temperature = self.temperature
        if temperature is not None:
            figures = temperature.measured(roots, token, selected)
            self.readback.send(figures, lambda values: temperature.learn(*values.tolist()))

    def end_step(
        self, requests: int, rows: int, context: float, forwards: int, *, prefills: bool, missed: bool, trees: bool
    ) -> None:
        """Choose the number of nodes of the next verification.

        Args:
            rows, context: of this step's verification; tokens in the cache before a row, in the mean.
            forwards: of the draft after the roots'.
            prefills: True if it read prompts.
            missed: True if the draft read tokens that it had skipped, or drafted nothing that could be used.
            trees: True if it has left some, of the draft or of a look-up.
        """
        if not self.learns:
            return
        rests, begun = self.budget.plan.levels == 0, self.times.begun
        if self.last is not None and begun is not None and not prefills:  # else the engine may have been idle before
            self.timed.append(self.last._replace(end=begun, draft=self.times.draft))
        usual = begun is not None and not prefills and not missed
        self.last = StepCost(requests, rows, context, 0 if rests else 1 + forwards, begun) if usual else None
        if not trees or (rests and not len(self.value)):
            self.nodes = 0
        elif len(self.value):
            like = np.arange(self.trees) % len(self.value)
            value, depth, greedy = self.value[like], self.depth[like], self.greedy[like]
            kept = self.budget.share(value, depth, greedy, rows=requests - self.trees)
            self.nodes = int(kept.sum())

    def _timed_steps(self) -> list[StepCost]:
        """Steps whose times can be read; where ranks must agree, so many at once, or none."""
        count = 0
        if self.alone:
            while len(self.timed) > count + LAG and passed(self.timed[count].end):
                count += 1
        elif len(self.timed) >= EVERY + LAG:
            count = EVERY
        return [self.timed.popleft() for _ in range(count)]

    def _learn(self, steps: Sequence[StepCost]) -> None:
        """Learn from the times of these steps; ranks from those of rank 0, whose temperature they take."""
        times = [step.times() for step in steps] if self.alone or is_rank_0() else []
        if not self.alone:
            times, self.temperature_of_ranks = object_from_rank_0((times, super().greedy_temperature))
        for step, its in zip(steps, times, strict=True):
            self._follow(step, its)

    def _follow(self, step: StepCost, times: StepTimes) -> None:
        """What drafting takes besides its levels is there whatever their number: a forward over the roots, or of a
        head's whole block, and look-ups."""
        level = level_seconds(times.growth, step.levels)
        if level is not None:
            self.budget.observe_level(step.requests, step.requests, level)
        rest = times.draft - step.levels * self.budget.level(step.requests)
        verifying = max(0.0, times.step - times.draft)
        self.budget.observe_step(step.rows, step.context, verifying, rest, drafted=step.levels > 0)

    def _on_trees(
        self, greedy: np.ndarray, drafting: np.ndarray | None, plan: Plan, nodes: int, figures: Tensor
    ) -> None:
        """`figures` [R, 3 * N or 4 * N]: of the trees, side by side. What their quota cuts off brings nothing."""
        parts = figures.numpy()
        quota = nodes if self.quotas is None else max(1, self.quotas[len(parts)])
        if drafting is not None:
            parts, greedy = parts[drafting], greedy[drafting]
        weight, token, depth, *level = (parts[:, at : at + quota] for at in range(0, parts.shape[1], nodes))
        self.value, self.depth, self.greedy = self.values(weight, token >= 0, None), depth, greedy
        self.budget.observe_trees(self.value, depth, greedy, plan, level=level[0] if level else None)

    def _on_verified(self, greedy: np.ndarray, placed: bool, nodes: int, figures: Tensor) -> None:
        """`figures` [R, 3 * N + L]: of the trees, and the accepted nodes, side by side; `placed`: places of the nodes
        are where their weights would be."""
        parts = figures.numpy()
        weight, token, depth = (parts[:, at * nodes : (at + 1) * nodes] for at in range(3))
        hit = np.zeros((len(parts), 1 + nodes), dtype=bool)
        hit[np.arange(len(parts))[:, None], parts[:, 3 * nodes :].astype(np.int64)] = True  # -1: the last
        known = token >= 0
        value = self.values(weight, known, weight if placed else None)
        kinds = np.broadcast_to(greedy[:, None], known.shape)
        self.budget.verified(*(part[known] for part in (value, depth, hit[:, :-1], kinds)))
