"""Plans what a batch drafts and verifies in a step, from past steps, by one price: its tokens per second."""

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
from vllm_adaptive_tree.json_numbers import MAX_NUMBER, member, numbers, short

LAST = 8
"""Window of the median of a step's overhead: about one step in a hundred stalls."""
TREES = 64
"""Number of trees that are remembered."""
MIN_TREES, MIN_STEPS = 8, 4
"""Fewest trees, of at least so many steps, that the planner relies on; until then chains replace the missing ones."""
PRIOR_ACCEPTANCE = 0.8
"""Acceptance probability of each node of such a chain, given its parent: optimistic, so that drafts get tried."""
EVERY = 16
"""Drafting steps of which one drafts a level more than the plan: a level that is never drafted is never measured."""
MARGIN = 0.05
"""Least gain of drafting over plain steps, as log tokens per second: costs are no more accurate."""
SURE = 1.3
"""Gain of drafting over plain steps, by the costs of the start, at which the first look at a plain step can wait."""
RETRY_AFTER, PROBE_EVERY, MAX_BACKOFF = 64, 512, 2048
"""Steps before an alternative is tried, doubled each time up to the last number: drafts in a batch that rests (first
number); a step without drafts in one that drafts (second), which costs tokens."""
SIZES = 256
"""Most numbers of nodes that a plan is chosen from."""
ALL = 1 << 30


class Plan(NamedTuple):
    """Plan of a step's drafting."""

    levels: int
    """Most levels of its trees; 0: the draft rests, look-ups go on."""
    price: float
    """Tokens per second of the batch: what a second of drafting or verifying must bring."""
    floor: float = -math.inf
    """Log value up to which a node's children are not drafted: no child has a larger value than its parent."""
    most: int | None = None
    """Most nodes of the whole batch."""
    deep: bool = False
    """True if it has one level more than the best plan, to measure that level."""


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
        self._taken = 0.0, 0.0

    def begin(self, greedy: Sequence[bool]) -> Plan:
        """Begin a step of these requests, each `greedy` or not, and return its plan."""
        return self.plan

    def level(self, requests: int) -> float:
        """Seconds of a draft level."""
        return self.costs.draft.cost(requests)

    def observe_trees(
        self, value: Tensor, depth: Tensor, greedy: Tensor, plan: Plan, *, level: Tensor | None = None
    ) -> None:
        """Record the trees of a step of this `plan`, before any cut; arguments as in `share`.

        Args:
            level: [R, N] draft levels that a node needs; 0: it is from a look-up. None: there is no look-up.
        """

    def share(self, value: Tensor, depth: Tensor, greedy: Tensor, *, rows: int = 0) -> Tensor:
        """Number of nodes of each tree to verify, [R].

        Args:
            value: [R, N] the proposer's value of each node before its token is known; 0 where there is none.
            depth: [R, N].
            greedy: [R] bool.
            rows: of the verification, besides the roots and nodes of these trees.
        """
        sampled, certain = self.calibrations
        chance = torch.where(greedy[:, None], certain(value, depth), sampled(value, depth))
        verify, price = self.costs.verify, self.plan.price
        sampled_children = self.sampled and not bool(greedy.all())
        kept = allocate(chance, verify=verify, price=price, sampled=sampled_children, rows=rows, most=self.plan.most)
        self.verifying = int(kept.sum())
        return kept

    def verified(self, value: Tensor, depth: Tensor, accepted: Tensor, greedy: Tensor) -> None:
        """Record the nodes [M] of a verification, with `accepted` of each, of requests that are `greedy` [M] or not."""
        for calibration, selected in zip(self.calibrations, (~greedy, greedy), strict=True):
            calibration.observe(*(part[selected].numpy() for part in (value, depth, accepted)))

    def observe_step(
        self, rows: int, context: int, forward: float, rest: float, *, drafted: bool | None, reading: float = 0
    ) -> None:
        """Record the times of a step.

        Args:
            rows, context: of its verification; tokens in the cache of all requests.
            forward, rest: seconds of the verification, and of all else but draft levels.
            drafted: True if it drafted; None for a step whose times say nothing about others.
            reading: seconds in which the draft read prompts.
        """

    def observe_level(self, requests: int, seconds: float) -> None:
        """Record the seconds of one draft level of the batch, forward and choice of nodes."""

    def take(self) -> tuple[float, float]:
        """Expected and observed numbers of accepted nodes since the last call."""
        now = (
            sum(calibration.predicted for calibration in self.calibrations),
            sum(calibration.observed for calibration in self.calibrations),
        )
        taken, self._taken = (now[0] - self._taken[0], now[1] - self._taken[1]), now
        return taken


class Planner(Budget):
    """Budget of a batch, planned from past steps; host side, on rank 0.

    Look-ups cost no draft level: their nodes are there without drafts too, and drafts are compared with them.

    One comparison decides everything: an action is taken if it brings more tokens than the batch makes in that time.
    The price of a second is the rate of the best plan for this batch: for each number of levels, the nodes of recent
    trees that are worth their rows, scaled to its requests, over what the step then costs. The price decides which
    nodes are verified, which are expanded, how many levels are drafted, and whether any are. All of it is known before
    the step samples.

    A plan that is never run is never measured, so the planner explores with exponential back-off, per batch size:
    drafts in a batch that rests from them, a step without drafts in one that drafts.
    """

    def __init__(self, costs: Costs, *, sampled: bool, drafts: bool = True):
        super().__init__(sampled=sampled, drafts=drafts)
        self.costs = costs
        self.probe = 2
        """Steps without drafts in a row that measure the time of one."""
        self.overheads = {drafted: deque[float](maxlen=LAST) for drafted in NAMES}
        """Seconds of a step besides its verification and draft levels, of steps that drafted and of those that did
        not."""
        self.reading = deque[float]([0.0], maxlen=TREES)
        """Seconds of drafting steps in which the draft read prompts."""
        self.context = 0.0
        """Seconds of the last verification due to its contexts."""
        self.warm_sizes: set[int] = set()
        """Row counts already run; the first forward of a size also compiles its kernels and is not timed."""
        self.recent, self.deep = (tuple(deque[PastTree](maxlen=TREES) for _ in (0, 1)) for _ in (0, 1))
        """Trees of past steps, of sampled and of greedy requests; those of steps that drafted deeper than pays."""
        self.lookup_trees = tuple(deque[PastTree](maxlen=TREES) for _ in (0, 1))
        """Trees of look-ups in past steps, drafting or not."""
        self.known = [0.0, 0.0]
        """Share of the needed trees that is known, of sampled and of greedy requests; 1 at most."""
        self.steps = 0
        self.resting: dict[int, Backoff] = {}
        self.drafting: dict[int, Backoff] = {}
        """Back-offs of batches that rest, and of those that draft, by batch size in powers of two."""
        self._plans: dict[tuple[int, int], Plan] = {}

    def begin(self, greedy: Sequence[bool]) -> Plan:
        self.steps += 1
        if self.steps % (EVERY // 2) == 0:
            self._plans.clear()
        if greedy:
            plan = self._planned(len(greedy), sum(greedy))
            self.plan = self._explore(plan, len(greedy), sum(greedy)) if self.drafts else plan
        return self.plan

    def _explore(self, plan: Plan, requests: int, greedy: int) -> Plan:
        """Plan, occasionally replaced to learn about an alternative."""
        kinds = [kind for kind, count in enumerate((requests - greedy, greedy)) if count]
        size = requests.bit_length()
        if not plan.levels:
            if not self.resting.setdefault(size, Backoff(RETRY_AFTER, 2 * RETRY_AFTER)).due():
                return plan
            for kind in kinds:  # the memory may be outdated
                self.recent[kind].clear()
                self.known[kind] = 0.0
            self._plans.clear()
            plan = self._planned(requests, greedy)
            return Plan(1 + max(1, plan.levels), plan.price, deep=True)
        if min(self.known[kind] for kind in kinds) < 1:
            return plan._replace(deep=True)
        self.resting.pop(size, None)
        sure = plan.price > SURE * requests / self.plain_step_seconds(requests)
        first = RETRY_AFTER if sure else 2
        if self.warm_sizes and self.drafting.setdefault(size, Backoff(first, PROBE_EVERY)).due(self.probe):
            return plan._replace(levels=0)
        if self.steps % EVERY == 0:
            return Plan(1 + plan.levels, plan.price, deep=True)
        fewer = self.verifying // 2
        if self.warm_sizes and self.steps % EVERY == EVERY // 2 and not self.costs.verify.knows(requests + fewer):
            return plan._replace(most=fewer)  # fewer rows may cost less than is believed
        return plan

    def plain_step_seconds(self, requests: int) -> float:
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
        plain_rate = requests / self.plain_step_seconds(requests)
        if any(self.lookup_trees):
            plain_rate = max(plain_rate, self._rate(self.lookup_trees, requests, greedy, range(1))[1])
        if not self.drafts:
            return Plan(0, plain_rate)
        levels, _, _ = self._rate(self.deep, requests, greedy, range(1, 1 + DEPTHS))
        _, rate, least = self._rate(self.recent, requests, greedy, range(levels, levels + 1))
        if math.log(rate / plain_rate) < MARGIN:
            return Plan(0, plain_rate)
        if min(known for known, share in zip(self.known, (1 - greedy, greedy), strict=True) if share) < 1:
            return Plan(levels, plain_rate)
        return Plan(levels, rate, least)

    def _rate(
        self, trees: Sequence[deque["PastTree"]], requests: int, greedy: float, levels: Sequence[int]
    ) -> tuple[int, float, float]:
        """Best of these numbers of levels, the tokens per second with it, and the log of the least value that is then
        verified, if all trees of the batch are like these."""
        value, level, chance, weight = self._nodes(trees, greedy)
        drafts = np.array(levels)[:, None]
        within = level <= drafts
        weights = np.where(within, weight, 0.0)
        cuts = np.unique(np.linspace(0, len(value) - 1, SIZES).astype(int))
        gain = requests * (1 + np.cumsum(weights * chance, axis=1)[:, cuts])
        rows = requests * (1 + np.cumsum(weights, axis=1)[:, cuts])
        verify = self.costs.verify.hull() if self.sampled and greedy < 1 else self.costs.verify
        drafting = drafts * self.level(requests) + self.overhead(drafted=True) + mean(self.reading)
        besides = np.where(drafts > 0, drafting, self.overhead(drafted=False))
        rate = gain / (verify.at(rows) + self.context + np.maximum(besides, 0.0))
        best, size = divmod(int(rate.argmax()), len(cuts))
        verified = value[: cuts[size] + 1][within[best, : cuts[size] + 1]]
        least = float(verified.min(initial=np.inf))
        return levels[best], float(rate[best, size]), math.log(least) if least < np.inf else -math.inf

    def _nodes(self, trees: Sequence[deque["PastTree"]], greedy: float) -> tuple[NDArray[Any], ...]:
        """Nodes of a request in the order of a cut: value, level, chance, and number of such nodes, all [M]."""
        chain = np.arange(1, 1 + DEPTHS)
        parts = [(np.full(DEPTHS, np.inf), chain, PRIOR_ACCEPTANCE**chain, PRIOR_ACCEPTANCE**chain, np.zeros(DEPTHS))]
        for kind, share in enumerate((1 - greedy, greedy)):
            known, calibration = self.known[kind], self.calibrations[kind]
            parts[0][-1][:] += share * (1 - known)
            for past_trees, part in ((trees[kind], known), (self.lookup_trees[kind], 1 - known)):
                if not past_trees or not share:
                    continue
                value, depth, level = (np.concatenate(column) for column in zip(*past_trees, strict=True))
                chance = calibration.chances(value, depth)
                ends = np.cumsum([len(tree.value) for tree in past_trees])[:-1]
                falling = np.concatenate([np.minimum.accumulate(tree) for tree in np.split(chance, ends)])
                parts.append((value, level, chance, falling, np.full(len(value), share * part / len(past_trees))))
        value, level, chance, falling, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(-falling, kind="stable")
        return value[order], level[order], chance[order], weight[order]

    def observe_trees(
        self, value: Tensor, depth: Tensor, greedy: Tensor, plan: Plan, *, level: Tensor | None = None
    ) -> None:
        kinds, columns = greedy.tolist(), (value.numpy(), depth.numpy(), (depth if level is None else level).numpy())
        trees = [PastTree.of(*tree) for tree in zip(*columns, strict=True)]
        if level is not None:
            for tree, kind in zip(trees, kinds, strict=True):
                if len(self.lookup_trees[kind]) < TREES:
                    self._plans.clear()
                self.lookup_trees[kind].append(PastTree(*(column[tree.level == 0] for column in tree)))
        if not plan.levels:
            return
        for kind in set(kinds):
            count = int((greedy == kind).sum())
            self.known[kind] = min(1.0, self.known[kind] + min(count / MIN_TREES, 1 / MIN_STEPS))
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
        if rows in self.warm_sizes:
            self.costs.verify.observe(rows, forward - self.context)
        self.warm_sizes.add(rows)
        if drafted:
            self.reading.append(reading)
        if drafted is not None:
            self.overheads[drafted].append(rest)

    def observe_level(self, requests: int, seconds: float) -> None:
        self.costs.draft.observe(requests, seconds)

    def to_json(self) -> dict[str, Any]:
        """Learnt state, for another process."""
        overhead = {NAMES[drafted]: short(known) for drafted, known in self.overheads.items()}
        return {"calibrations": [calibration.to_json() for calibration in self.calibrations], "overhead": overhead}

    def restore(self, data: Any) -> None:
        """Restore the data that `to_json` gave. Raises ValueError where `data` is something else."""
        overhead = member(data, "overhead")
        overheads = {drafted: numbers(member(overhead, name), None, -MAX_NUMBER) for drafted, name in NAMES.items()}
        calibrations = member(data, "calibrations")
        if not isinstance(calibrations, list):
            raise ValueError("'calibrations' is no list")
        for calibration, known in zip(self.calibrations, calibrations, strict=True):
            calibration.restore(known)
        for drafted, seconds in overheads.items():
            self.overheads[drafted].extend(seconds)


NAMES = {True: "drafting", False: "plain"}
"""Names in a file of the kinds of steps that have an overhead."""


class Backoff:
    """Counts steps, and tells when to try an alternative, with doubling intervals."""

    def __init__(self, first: int, then: int):
        self.left, self.next = first, then

    def due(self, times: int = 1) -> bool:
        """Count a step and return whether to try now, so many `times` in a row."""
        self.left -= 1
        if self.left <= -times:
            self.left, self.next = self.next, min(2 * self.next, MAX_BACKOFF)
            return True
        return self.left < 0


class PastTree(NamedTuple):
    """A tree of a past step: its nodes [N], by decreasing value."""

    value: NDArray[np.float64]
    depth: NDArray[np.int64]
    level: NDArray[np.int64]
    """Draft levels that a node needs; 0: from a look-up."""

    @classmethod
    def of(cls, value: NDArray[Any], depth: NDArray[Any], level: NDArray[Any]) -> "PastTree":
        """Tree without its empty slots, those with value 0 among [N]."""
        return cls(value[value > 0].astype(np.float64), depth[value > 0], level[value > 0])
