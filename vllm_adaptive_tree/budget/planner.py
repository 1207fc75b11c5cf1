"""What a batch drafts and verifies in a step, decided from past steps by one price: its tokens per second."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean as mean
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_adaptive_tree.budget.acceptance_model import DEPTHS, Calibration
from vllm_adaptive_tree.budget.allocation import allocate
from vllm_adaptive_tree.budget.cost import FREE, Costs
from vllm_adaptive_tree.budget.reading import MOST, member, numbers, short

LAST = 8
"""Window of the median of a step's overhead: about one step in a hundred stalls."""
TREES = 64
"""Trees that are remembered."""
ENOUGH, STEPS = 8, 4
"""Until so many trees of so many steps are known, chains stand for the missing ones."""
HOPE = 0.8
"""Acceptance probability of each node of such a chain, given its parent: optimistic, so that drafts get tried."""
EVERY = 16
"""Of so many drafting steps one drafts a level more than the plan: a level that is never drafted is never judged."""
MARGIN = 0.05
"""Least gain of drafting over plain steps, as log tokens per second: costs are no more accurate."""
REST, LOOK, LONGEST = 64, 512, 2048
"""Steps until something else is tried, each time after twice as many up to a bound: drafts by a batch that rests from
them; steps without drafts by one that drafts, which pays for that look with tokens."""
SIZES = 256
"""Numbers of nodes that a plan is chosen from."""
ALL = 1 << 30


class Plan(NamedTuple):
    """What a step drafts."""

    levels: int
    """Most levels of its trees; 0: the draft rests, look-ups go on."""
    price: float
    """Tokens per second of the batch: what a second of drafting or verifying has to bring."""
    floor: float = -math.inf
    """Log value up to which a node's children are not worth drafting: no child is worth more than its parent."""
    most: int | None = None
    """Most nodes of the whole batch."""
    deep: bool = False
    """Whether it has one level more than the best plan, to learn what it brings."""


class Budget:
    """A fixed number of nodes for the whole batch."""

    def __init__(self, *, sampled: bool, most: int | None = None):
        """`sampled`: whether children are sampled. `most`: nodes of the batch."""
        self.sampled, self.most, self.verifying = sampled, most, 0
        self.calibrations = Calibration(), Calibration()
        """Of sampled requests, and of greedy ones: one value is not one chance to both."""
        self.costs, self.plan = FREE, Plan(ALL, 0.0, most=most)
        self._taken = 0.0, 0.0

    def begin(self, greedy: Sequence[bool]) -> Plan:
        """A step of these requests."""
        return self.plan

    def level(self, requests: int) -> float:
        """Seconds of a draft level."""
        return self.costs.draft.cost(requests)

    def observe_trees(
        self, value: Tensor, depth: Tensor, greedy: Tensor, plan: Plan, *, level: Tensor | None = None
    ) -> None:
        """Trees of a step of this `plan`, before any cut; as in `share`.

        Args:
            level: [R, N] draft levels that a node needs; 0: a look-up brings it. None: there is no look-up.
        """

    def share(self, value: Tensor, depth: Tensor, greedy: Tensor, *, rows: int = 0) -> Tensor:
        """How many nodes of each tree to verify, [R].

        Args:
            value: [R, N] what the proposer puts on each node before it knows its token; 0 where there is none.
            depth: [R, N].
            greedy: [R] bool.
            rows: of the verification, besides the roots and nodes of these trees.
        """
        sampled, certain = self.calibrations
        chance = torch.where(greedy[:, None], certain(value, depth), sampled(value, depth))
        verify, price = self.costs.verify, self.plan.price
        kept = allocate(chance, verify=verify, price=price, sampled=self.sampled, rows=rows, most=self.plan.most)
        self.verifying = int(kept.sum())
        return kept

    def verified(self, value: Tensor, depth: Tensor, accepted: Tensor, greedy: Tensor) -> None:
        """Nodes [M] of a verification, and which were accepted, of requests that are `greedy` [M] or not."""
        for calibration, among in zip(self.calibrations, (~greedy, greedy), strict=True):
            calibration.observe(value[among].tolist(), depth[among].tolist(), accepted[among].tolist())

    def observe_step(
        self, rows: int, context: int, forward: float, rest: float, *, drafted: bool | None, reading: float = 0
    ) -> None:
        """What a step took.

        Args:
            rows, context: of its verification; tokens in the cache of all requests.
            forward, rest: seconds of the verification, and of all else but draft levels.
            drafted: whether it drafted; None for steps that say nothing of others.
            reading: seconds in which the draft read prompts.
        """

    def observe_level(self, requests: int, seconds: float) -> None:
        """One draft level of the batch took these seconds, forward and choice of nodes."""

    def take(self) -> tuple[float, float]:
        """Accepted nodes that were expected, and those observed, since the last call."""
        now = sum(one.predicted for one in self.calibrations), sum(one.observed for one in self.calibrations)
        taken, self._taken = (now[0] - self._taken[0], now[1] - self._taken[1]), now
        return taken


class Planner(Budget):
    """The budget of a batch; host side, on rank 0.

    Look-ups cost no draft level: what they bring is there without drafts too, and it is what drafts are compared with.

    One comparison answers every question: what brings more tokens than the batch brings in that time is done. The price
    of a second is the rate of the best plan for this batch: for each number of levels, the nodes of recent trees that
    are worth their rows, scaled to its requests, over what the step then costs. It follows which nodes are verified,
    which are expanded, how many levels are drafted, and whether any are. All of it is known before the step samples.

    What is not done is not seen, so it is tried again after a while, and after twice that while: drafts by a batch that
    rests from them, a step without drafts by one that drafts.
    """

    def __init__(self, costs: Costs, *, sampled: bool):
        super().__init__(sampled=sampled)
        self.costs = costs
        self.probe = 3
        """Steps without drafts that show what one takes."""
        self.overheads = {drafted: deque[float](maxlen=LAST) for drafted in NAMES}
        """Seconds of a step besides its verification and draft levels, of steps that drafted and of those that did
        not."""
        self.reading = deque[float]([0.0], maxlen=TREES)
        """Seconds in which the draft read prompts, of drafting steps."""
        self.context = 0.0
        """Seconds of the last verification that its contexts took."""
        self.met: set[int] = set()
        """Rows of the forwards so far: the first of so many also makes the kernels for them."""
        self.recent, self.deep = (tuple(deque[Tree](maxlen=TREES) for _ in (0, 1)) for _ in (0, 1))
        """Trees of past steps, of sampled and of greedy requests; those of steps that drafted deeper than pays."""
        self.found = tuple(deque[Tree](maxlen=TREES) for _ in (0, 1))
        """What look-ups have brought to past steps, drafting or not."""
        self.known = [0.0, 0.0]
        """How much of what is to be known of either kind's trees, 1 at most."""
        self.steps = 0
        self.resting: dict[int, Backoff] = {}
        self.drafting: dict[int, Backoff] = {}
        """By batch size, in powers of two."""
        self._plans: dict[tuple[int, int], Plan] = {}

    def begin(self, greedy: Sequence[bool]) -> Plan:
        self.steps += 1
        if self.steps % (EVERY // 2) == 0:
            self._plans.clear()
        if greedy:
            self.plan = self._tried(self._planned(len(greedy), sum(greedy)), len(greedy), sum(greedy))
        return self.plan

    def _tried(self, plan: Plan, requests: int, greedy: int) -> Plan:
        """The plan, or now and then something else, to see what it brings."""
        kinds = [kind for kind, count in enumerate((requests - greedy, greedy)) if count]
        size = requests.bit_length()
        if not plan.levels:
            if not self.resting.setdefault(size, Backoff(REST, 2 * REST)).due():
                return plan
            for kind in kinds:  # what is believed may be of another time
                self.recent[kind].clear()
                self.known[kind] = 0.0
            self._plans.clear()
            plan = self._planned(requests, greedy)
            return Plan(1 + max(1, plan.levels), plan.price, deep=True)
        if min(self.known[kind] for kind in kinds) < 1:
            return Plan(1 + plan.levels, plan.price, deep=True)
        self.resting.pop(size, None)
        if self.met and self.drafting.setdefault(size, Backoff(2, LOOK)).due(self.probe):
            return plan._replace(levels=0)
        if self.steps % EVERY == 0:
            return Plan(1 + plan.levels, plan.price, deep=True)
        fewer = self.verifying // 2
        if self.met and self.steps % EVERY == EVERY // 2 and not self.costs.verify.knows(requests + fewer):
            return plan._replace(most=fewer)  # fewer rows may cost less than is believed
        return plan

    def without(self, requests: int) -> float:
        """Seconds of a step without drafts."""
        return self.costs.verify.cost(requests) + self.context + max(0.0, self.overhead(drafted=False))

    def overhead(self, *, drafted: bool) -> float:
        """Seconds of a step besides its verification and draft levels."""
        return median(self.overheads[drafted] or self.overheads[not drafted] or [0.0])

    def _planned(self, requests: int, greedy: int) -> Plan:
        """The plan of a batch of so many requests, of which so many are `greedy`."""
        if (requests, greedy) not in self._plans:
            self._plans[requests, greedy] = self._best(requests, greedy / max(1, requests))
        return self._plans[requests, greedy]

    def _best(self, requests: int, greedy: float) -> Plan:
        without = requests / self.without(requests)
        if any(self.found):
            without = max(without, self._rate(self.found, requests, greedy, range(1))[1])
        levels, _, _ = self._rate(self.deep, requests, greedy, range(1, 1 + DEPTHS))
        _, rate, least = self._rate(self.recent, requests, greedy, range(levels, levels + 1))
        if math.log(rate / without) < MARGIN:
            return Plan(0, without)
        if min(known for known, share in zip(self.known, (1 - greedy, greedy), strict=True) if share) < 1:
            return Plan(levels, without)
        return Plan(levels, rate, least)

    def _rate(
        self, trees: Sequence[deque["Tree"]], requests: int, greedy: float, levels: Sequence[int]
    ) -> tuple[int, float, float]:
        """The best of these numbers of levels, the tokens per second with it, and the log of the least value that is
        then verified, if all trees of the batch were like these."""
        value, level, chance, weight = self._nodes(trees, greedy)
        drafts = np.array(levels)[:, None]
        within = level <= drafts
        weights = np.where(within, weight, 0.0)
        some = np.unique(np.linspace(0, len(value) - 1, SIZES).astype(int))
        gain = requests * (1 + np.cumsum(weights * chance, axis=1)[:, some])
        rows = requests * (1 + np.cumsum(weights, axis=1)[:, some])
        verify = self.costs.verify.hull() if self.sampled else self.costs.verify
        drafting = drafts * self.level(requests) + self.overhead(drafted=True) + mean(self.reading)
        besides = np.where(drafts > 0, drafting, self.overhead(drafted=False))
        rate = gain / (verify.at(rows) + self.context + np.maximum(besides, 0.0))
        best, size = divmod(int(rate.argmax()), len(some))
        verified = value[: some[size] + 1][within[best, : some[size] + 1]]
        least = float(verified.min(initial=np.inf))
        return levels[best], float(rate[best, size]), math.log(least) if least < np.inf else -math.inf

    def _nodes(self, trees: Sequence[deque["Tree"]], greedy: float) -> tuple[NDArray[Any], ...]:
        """Nodes of a request in the order of a cut: value, level, chance, and how many such nodes it has, all [M]."""
        chain = np.arange(1, 1 + DEPTHS)
        parts = [(np.full(DEPTHS, np.inf), chain, HOPE**chain, HOPE**chain, np.zeros(DEPTHS))]
        for kind, share in enumerate((1 - greedy, greedy)):
            known, calibration = self.known[kind], self.calibrations[kind]
            parts[0][-1][:] += share * (1 - known)
            for those, part in ((trees[kind], known), (self.found[kind], 1 - known)):
                if not those or not share:
                    continue
                value, depth, level = (np.concatenate(column) for column in zip(*those, strict=True))
                chance = calibration.chances(value, depth)
                ends = np.cumsum([len(tree.value) for tree in those])[:-1]
                falling = np.concatenate([np.minimum.accumulate(tree) for tree in np.split(chance, ends)])
                parts.append((value, level, chance, falling, np.full(len(value), share * part / len(those))))
        value, level, chance, falling, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(-falling, kind="stable")
        return value[order], level[order], chance[order], weight[order]

    def observe_trees(
        self, value: Tensor, depth: Tensor, greedy: Tensor, plan: Plan, *, level: Tensor | None = None
    ) -> None:
        kinds, columns = greedy.tolist(), (value.numpy(), depth.numpy(), (depth if level is None else level).numpy())
        trees = [Tree.of(*tree) for tree in zip(*columns, strict=True)]
        if level is not None:
            for tree, kind in zip(trees, kinds, strict=True):
                if len(self.found[kind]) < TREES:
                    self._plans.clear()
                self.found[kind].append(Tree(*(column[tree.level == 0] for column in tree)))
        if not plan.levels:
            return
        for kind in set(kinds):
            count = int((greedy == kind).sum())
            self.known[kind] = min(1.0, self.known[kind] + min(count / ENOUGH, 1 / STEPS))
            if plan.deep or len(self.recent[kind]) < TREES:
                self._plans.clear()
        for tree, kind in zip(trees, kinds, strict=True):
            self.recent[kind].append(tree)
            if plan.deep:
                self.deep[kind].append(tree)

    def observe_step(
        self, rows: int, context: int, forward: float, rest: float, *, drafted: bool | None, reading: float = 0
    ) -> None:
        self.context = min(context * self.costs.context, forward / 2)
        if rows in self.met:
            self.costs.verify.observe(rows, forward - self.context)
        self.met.add(rows)
        if drafted:
            self.reading.append(reading)
        if drafted is not None:
            self.overheads[drafted].append(rest)

    def observe_level(self, requests: int, seconds: float) -> None:
        self.costs.draft.observe(requests, seconds)

    def to_json(self) -> dict[str, Any]:
        """What was learnt, for another process."""
        overhead = {NAMES[drafted]: short(known) for drafted, known in self.overheads.items()}
        return {"calibrations": [one.to_json() for one in self.calibrations], "overhead": overhead}

    def restore(self, data: Any) -> None:
        """What `to_json` gave. Raises ValueError where `data` is something else."""
        overhead = member(data, "overhead")
        overheads = {drafted: numbers(member(overhead, name), None, -MOST) for drafted, name in NAMES.items()}
        calibrations = member(data, "calibrations")
        if not isinstance(calibrations, list):
            raise ValueError("'calibrations' is no list")
        for one, known in zip(self.calibrations, calibrations, strict=True):
            one.restore(known)
        for drafted, seconds in overheads.items():
            self.overheads[drafted].extend(seconds)


NAMES = {True: "drafting", False: "plain"}
"""Of the steps that an overhead is of, in a file."""


class Backoff:
    """Counts steps, and says when to try what they leave out: each time after twice as many."""

    def __init__(self, first: int, then: int):
        self.left, self.next = first, then

    def due(self, times: int = 1) -> bool:
        """A step; whether to try now, so many `times` in a row."""
        self.left -= 1
        if self.left <= -times:
            self.left, self.next = self.next, min(2 * self.next, LONGEST)
            return True
        return self.left < 0


class Tree(NamedTuple):
    """A tree of a past step: its nodes [N], by decreasing value."""

    value: NDArray[np.float64]
    depth: NDArray[np.int64]
    level: NDArray[np.int64]
    """Draft levels that a node needs; 0: a look-up brings it."""

    @classmethod
    def of(cls, value: NDArray[Any], depth: NDArray[Any], level: NDArray[Any]) -> "Tree":
        """Slots [N] with value 0 are empty."""
        return cls(value[value > 0].astype(np.float64), depth[value > 0], level[value > 0])
