"""Policies that a replay compares: the budget, constant trees and chains, and no drafts, behind one protocol."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray

from vllm_adaptive_tree.budget import Costs, Planner, Turns
from vllm_adaptive_tree.budget.fixed import ALL

NODES = 24
"""Most nodes of a tree."""


class StepPlan(NamedTuple):
    """Plan of a step's drafting."""

    draft: Sequence[bool]  # by request; none: the batch rests
    levels: int = ALL  # draft forwards after the one that reads the roots, at most: 0 drafts their children alone
    floor: float = -math.inf  # log value up to which a node is not expanded
    threshold: float = 0.0  # tokens that a level has to add to each tree, or it is the last
    nodes: int = NODES  # of each tree, at most
    chain: bool = False  # only first children


class Policy(Protocol):
    """Decides what a batch drafts and verifies.

    In every step, in the order of the calls: the trees kept in the last one are `verified`; `begin` says what to draft;
    unless the batch rests, `share` cuts the new trees; then the step `took` its time. `forget` names requests that have
    left. R: drafting requests; N: nodes, padded with value 0 and depth 0; all on the host.
    """

    def verified(self, value: NDArray[Any], depth: NDArray[Any], accepted: NDArray[Any], *, greedy: bool) -> None:
        """Record all verified nodes [M] of greedy requests, or of the others: value, depth, and `accepted` of each."""

    def begin(self, requests: Sequence[str], greedy: Sequence[bool]) -> StepPlan:
        """Plan of a step of these requests."""

    def share(
        self,
        requests: Sequence[str],
        value: NDArray[Any],
        depth: NDArray[Any],
        greedy: NDArray[Any],
        seconds: Sequence[float],
        *,
        others: int,
        usual: bool,
    ) -> Sequence[int]:
        """Number of nodes of each tree to verify, [R]: a prefix of its list.

        Args:
            requests: of the trees.
            value, depth: [R, N].
            greedy: [R] bool.
            seconds: of each draft forward, the one that read the roots first.
            others: requests that drafted nothing.
            usual: True if the first forward read no prompts, and no gaps after a rest.
        """

    def took(self, rows: int, verify: float, elsewhere: float, requests: int) -> None:
        """Record the seconds of a step that verified so many rows, roots included, besides its drafts."""

    def forget(self, requests: Sequence[str]) -> None: ...


class Fixed:
    """The same trees or chains in every step; of no nodes, no drafts."""

    def __init__(self, nodes: int, levels: int = ALL, *, chain: bool = False):
        self.nodes, self.levels, self.chain = nodes, levels, chain

    def plan(self, draft: Sequence[bool] = ()) -> StepPlan:
        return StepPlan(draft, self.levels, nodes=self.nodes, chain=self.chain)

    def begin(self, requests: Sequence[str], greedy: Sequence[bool]) -> StepPlan:
        return self.plan([self.nodes > 0] * len(requests))

    def share(self, requests: Sequence[str], *_: Any, **__: Any) -> Sequence[int]:
        return [self.nodes] * len(requests)

    def verified(self, *_: Any, **__: Any) -> None: ...

    def took(self, *_: Any) -> None: ...

    def forget(self, *_: Any) -> None: ...


class Auto:
    """The budget "auto", driven as Model Runner V1 does."""

    def __init__(self, costs: Costs, sampled: bool):
        self.planner = Planner(costs, sampled=sampled)
        self.drafted, self.gaps, self.turns = False, True, Turns()
        self.first = self.reading = 0.0
        """Seconds of the roots' forward beyond a level's, in usual steps, and in those that read prompts."""

    def verified(self, value: NDArray[Any], depth: NDArray[Any], accepted: NDArray[Any], *, greedy: bool) -> None:
        nodes = torch.from_numpy(value), torch.from_numpy(depth), torch.from_numpy(accepted)
        self.planner.verified(*nodes, torch.full((len(value),), greedy))

    def begin(self, requests: Sequence[str], greedy: Sequence[bool]) -> StepPlan:
        plan, batch = self.planner.begin(greedy), len(requests)
        self.gaps, self.drafted = not self.drafted, plan.levels > 0
        self.first = self.reading = 0.0
        chosen = self.turns.chosen(greedy, plan.few) if self.drafted else [False] * batch
        trees = max(1, sum(chosen))
        threshold = self.planner.level(trees if plan.few else batch) * plan.price / trees
        return StepPlan(chosen, max(0, plan.levels - 1), plan.floor, threshold)

    def share(
        self,
        requests: Sequence[str],
        value: NDArray[Any],
        depth: NDArray[Any],
        greedy: NDArray[Any],
        seconds: Sequence[float],
        *,
        others: int,
        usual: bool,
    ) -> Sequence[int]:
        planner = self.planner
        batch = len(requests) if planner.plan.few else len(requests) + others
        for one in seconds[1:]:
            planner.observe_level(batch, batch, one)
        beyond = seconds[0] - planner.level(batch)
        if usual:
            self.first = beyond
        elif not self.gaps:
            self.reading = max(0.0, beyond)
        trees = torch.from_numpy(value), torch.from_numpy(depth), torch.from_numpy(greedy)
        planner.observe_trees(*trees, planner.plan)
        kept: list[int] = planner.share(*trees, rows=others).tolist()
        return kept

    def took(self, rows: int, verify: float, elsewhere: float, requests: int) -> None:
        drafted = True if self.drafted else False if rows == requests else None
        self.planner.observe_step(rows, 0, verify, elsewhere + self.first, drafted=drafted, reading=self.reading)

    def forget(self, requests: Sequence[str]) -> None: ...
