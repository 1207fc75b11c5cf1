"""Budget of a batch in the engine, for both model runners; each feeds it its own figures."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_adaptive_tree.budget import Budget, DraftTemperature, Plan, Planner
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.proposers.options import GREEDY_DRAFT_TEMPERATURE
from vllm_adaptive_tree.trees import TreeBatch


class BatchBudget(ABC):
    """Asks a `Budget` what a step drafts and verifies. Subclasses report the results to it: V1 from its clock, V2 from
    figures of earlier steps."""

    def __init__(self, budget: Budget, steering: ThresholdController):
        self.budget, self.steering = budget, steering
        self.temperature: DraftTemperature | None = None
        """Fit of the draft temperature of greedy requests."""
        self.by_place = steering.proposer.by_place

    @property
    def greedy_temperature(self) -> float:
        """Temperature of the distribution that shapes the trees of greedy requests."""
        return GREEDY_DRAFT_TEMPERATURE if self.temperature is None else self.temperature.temperature

    @property
    @abstractmethod
    def verifying(self) -> int | None:
        """Most nodes of the next verification; None: all."""

    @property
    def gauges(self) -> dict[str, float]:
        """Current values by name of the metric; a fixed budget has no price."""
        gauges: dict[str, float] = {} if self.verifying is None else {"budget_nodes": self.verifying}
        if isinstance(self.budget, Planner):
            plan = self.budget.plan
            return {**gauges, "draft_levels": plan.levels, "price_tokens_per_second": plan.price}
        return gauges

    def begin(self, greedy: Sequence[bool]) -> Plan:
        """Begin a step of these requests, each `greedy` or not, and return its plan."""
        return self.budget.begin(greedy)

    def steer(self, requests: int, trees: int) -> None:
        """Set the thresholds before `trees` trees are drafted in a batch of so many `requests`."""
        plan = self.budget.plan
        self.steering.price(self.budget.level(requests) * plan.price / trees, plan.floor)

    def values(self, weight: NDArray[Any], valid: NDArray[np.bool_], place: NDArray[Any] | None) -> NDArray[Any]:
        """[R, N]: value of each node before its token is known, from its log `weight`; 0 where there is none.

        Nodes of a fixed shape count by their `place` [R, N] in generation order (None: their own): a sampled token must
        not influence its own cut.
        """
        if not self.by_place:
            return np.where(valid, np.exp(weight), 0.0)
        return np.where(valid, 1 / (1 + (np.arange(weight.shape[1]) if place is None else place)), 0.0)


def place_values(tree: TreeBatch) -> Tensor:
    """[R, N]: values that fall with the place in the list."""
    place = torch.arange(1, 1 + tree.tokens.shape[1], device=tree.tokens.device)
    return (1 / place).expand(tree.tokens.shape)
