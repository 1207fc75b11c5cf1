"""A fixed number of nodes for a batch, and what any budget tells and learns."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_adaptive_tree.budget.acceptance_model import Calibration
from vllm_adaptive_tree.budget.allocation import allocate
from vllm_adaptive_tree.budget.cost import FREE

ALL = 1 << 30


class Plan(NamedTuple):
    """Plan of a step's drafting."""

    levels: int
    """Most levels of its trees; 0: the draft rests, look-ups go on."""
    price: float
    """Tokens per second of the batch: what a second of drafting or verifying must bring."""
    floor: float = -math.inf
    """Log value up to which a node's children are not drafted: no child has a larger value than its parent."""
    least: float = 0.0
    """Acceptance probability that a node of sampled children needs to be verified."""
    most: int | None = None
    """Most nodes of the whole batch."""
    deep: bool = False
    """True if it has one level more than the best plan, to measure that level."""
    few: int = 0
    """Requests that draft in a trial of a resting batch, of which the others rest on; 0: all."""


class Budget:
    """A fixed number of nodes for the whole batch."""

    def __init__(self, *, sampled: bool, most: int | None = None, drafts: bool = True):
        """
        Args:
            sampled: True if children of requests that are not greedy are sampled.
            most: nodes of the batch.
            drafts: False if look-ups are all the draft there is.
        """
        self.sampled, self.most, self.drafts, self.verifying = sampled, most, drafts, 0
        self.calibrations = Calibration(), Calibration()
        """Calibrations of sampled requests, and of greedy ones: a value means another probability for each."""
        self.costs, self.plan = FREE, Plan(ALL if drafts else 0, 0.0, most=most)
        self.width = 1.0
        """Rows of a draft level for each request."""
        self.context = 0.0
        """Seconds of each row of a verification due to its context."""
        self._taken = 0.0, 0.0

    def begin(self, greedy: Sequence[bool]) -> Plan:
        """Begin a step of these requests, each `greedy` or not, and return its plan."""
        return self.plan

    def level(self, requests: int) -> float:
        """Seconds of a draft level."""
        return self.costs.draft.cost(requests * self.width)

    def observe_trees(
        self, value: ArrayLike, depth: ArrayLike, greedy: ArrayLike, plan: Plan, *, level: ArrayLike | None = None
    ) -> None:
        """Record the trees of a step of this `plan`, before any cut; arguments as in `share`.

        Args:
            level: [R, N] draft levels that a node needs; 0: it is from a look-up. None: there is no look-up.
        """

    def worth_of_node(self, requests: int, rows: int, price: float) -> float:
        """Tokens that a node must bring at this `price`, where each of so many requests has one more in a verification
        of so many rows."""
        verify = self.costs.verify
        return price * ((verify.cost(rows + requests) - verify.cost(rows)) / requests + self.context)

    def share(
        self, value: ArrayLike, depth: ArrayLike, greedy: ArrayLike, *, rows: int = 0, full: int = 0
    ) -> NDArray[np.int64]:
        """Number of nodes of each tree to verify, [R].

        Args:
            value: [R, N] the proposer's value of each node before its token is known; 0 where there is none.
            depth: [R, N]; negative for a look-up's node, as in `Calibration`.
            greedy: [R] bool.
            rows: of the verification, besides the roots and nodes of these trees.
            full: of the largest step, if prompts are among those rows: with them a row often costs more than in others.
        """
        kinds = np.asarray(greedy)
        count = int(np.count_nonzero(kinds))
        sampled, certain = self.calibrations
        chance = (certain if count == len(kinds) else sampled).chances(value, depth)
        if 0 < count < len(kinds):
            chance = np.where(kinds[:, None], certain.chances(value, depth), chance)
        verify, price, least = self.costs.verify, self.plan.price, None
        if self.sampled and count < len(kinds) and (self.plan.levels or full):  # at rest nothing is sampled
            least = self.plan.least
            if full:
                least = max(least, self.worth_of_node(len(kinds), full, price))
        kept = allocate(
            chance,
            verify=verify,
            price=price,
            least=least,
            row=self.context,
            rows=rows,
            most=self.plan.most,
        )
        self.verifying = int(kept.sum())
        return kept

    def look_up_pays(self, greedy: Sequence[bool], nodes: int, *, rows: int = 0) -> bool:
        """Return whether any number of a look-up's nodes, at most so many of each request, could bring what its rows
        cost in a step without other nodes. `rows` as in `share`."""
        roots, verify = rows + len(greedy), self.costs.verify
        kinds = {bool(kind) for kind in greedy}
        chance = max(float(self.calibrations[kind].chances([1.0], [-1])[0]) for kind in kinds)  # of the likeliest node
        most = len(greedy) * nodes
        points = verify.rows - roots  # between them the cost is linear
        more = np.concatenate([[1, most], points[(points > 1) & (points < most)]])
        seconds = verify.at(roots + more) - verify.cost(roots) + self.context * more
        return bool((chance * more > self.plan.price * seconds).any())

    def verified(self, value: ArrayLike, depth: ArrayLike, accepted: ArrayLike, greedy: ArrayLike) -> None:
        """Record the nodes [M] of a verification, with `accepted` of each, of requests that are `greedy` [M] or not."""
        kinds = np.asarray(greedy)
        for kind, calibration in enumerate(self.calibrations):
            chosen = kinds == kind
            if chosen.all():
                calibration.observe(value, depth, accepted)
            elif chosen.any():
                calibration.observe(*(np.asarray(part)[chosen] for part in (value, depth, accepted)))

    def observe_step(
        self, rows: int, context: float, forward: float, rest: float, *, drafted: bool | None, reading: float = 0
    ) -> None:
        """Record the times of a step.

        Args:
            rows, context: of its verification; tokens in the cache before a row, in the mean.
            forward, rest: seconds of the verification, and of all else but draft levels.
            drafted: True if it drafted; None for a step whose times say nothing about others.
            reading: seconds in which the draft read prompts.
        """

    def observe_level(self, requests: int, rows: int, seconds: float) -> None:
        """Record the seconds of one draft level of the batch that read so many rows: forward and choice of nodes."""

    def take(self) -> tuple[float, float]:
        """Expected and observed numbers of accepted nodes since the last call."""
        now = (
            sum(calibration.predicted for calibration in self.calibrations),
            sum(calibration.observed for calibration in self.calibrations),
        )
        taken, self._taken = (now[0] - self._taken[0], now[1] - self._taken[1]), now
        return taken
