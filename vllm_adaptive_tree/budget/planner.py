"""Plans what a batch drafts and verifies in a step, from past steps, by one price: its tokens per second."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean as mean
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_adaptive_tree.budget.backoff import PROBE_EVERY, RETRY_AFTER, Backoff
from vllm_adaptive_tree.budget.calibration_loops import DEPTHS
from vllm_adaptive_tree.budget.cost import Costs, Curve
from vllm_adaptive_tree.budget.fixed import Budget, Plan
from vllm_adaptive_tree.budget.past_trees import TREES, PastTrees
from vllm_adaptive_tree.budget.trial import trial_size
from vllm_adaptive_tree.json_numbers import MAX_NUMBER, member, numbers, short

LAST = 8
"""Window of the medians of a step's overhead and of what a row's context costs: about one step in a hundred stalls, and
the rows of a prompt begin without one; levels that a width remembers."""
MIN_TREES, MIN_STEPS = 8, 4
"""Fewest trees, of at least so many steps, that the planner relies on; until then chains replace the missing ones."""
PRIOR_ACCEPTANCE = 0.8
"""Acceptance probability of each node of such a chain, given its parent: optimistic, so that drafts get tried."""
EVERY = 16
"""Drafting steps of which one drafts a level more than the plan: a level that is never drafted is never measured. Also
the steps of a batch at rest from one plan to the next."""
MARGIN = 0.05
"""Least gain of drafting over plain steps, as log tokens per second: costs are no more accurate. Also that of look-ups
alone over drafting: they end with a repetition, and a draft beside them costs little while it lasts."""
SURE = 1.3
"""Gain of drafting over plain steps, by the costs of the start, at which the first look at a plain step can wait."""
TRIED = 8
"""Nodes of look-ups that are verified in a trial of a batch that verifies none."""
SIZES = 256
"""Most numbers of nodes that a plan is chosen from."""


class Planner(Budget):
    """Budget of a batch, planned from past steps; host side, on rank 0.

    Look-ups cost no draft level: their nodes are there without drafts too, and drafts are compared with them.

    One comparison decides everything: an action is taken if it brings more tokens than the batch makes in that time.
    The price of a second is the rate of the best plan for this batch: for each number of levels, the nodes of recent
    trees that are worth their rows, scaled to its requests, over what the step then costs. The price decides which
    nodes are verified, which are expanded, how many levels are drafted, and whether any are. All of it is known before
    the step samples.

    A plan that is never run is never measured, so the planner explores with exponential back-off, per batch size:
    drafts in a batch that rests from them, a step without drafts in one that drafts, nodes of look-ups where none pays.
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
        self.contexts = deque[float](maxlen=LAST)
        """`context` of past steps."""
        self.warm_sizes, self.warm_levels = set[int](), set[int]()
        """Row counts already run, of verifications and of draft levels."""
        self.recent, self.deep = ((PastTrees(), PastTrees()) for _ in (0, 1))
        """Trees of past steps, of sampled and of greedy requests; those of steps that drafted deeper than pays."""
        self.lookup_trees = PastTrees(), PastTrees()
        """Trees of look-ups in past steps, drafting or not."""
        self.known = [0.0, 0.0]
        """Share of the needed trees that is known, of sampled and of greedy requests; 1 at most."""
        self.steps, self.most_levels = 0, 1 + DEPTHS
        """Steps so far; most levels of a trial, until its trees are known."""
        self.resting: dict[int, Backoff] = {}
        self.drafting: dict[int, Backoff] = {}
        self.looking: dict[int, Backoff] = {}
        """Back-offs of batches that rest, that draft, and that verify nothing, by batch size in powers of two."""
        self._plans: dict[tuple[int, int], Plan] = {}
        self._look_up_pays: dict[tuple[int, int, int, int], bool] = {}

    def begin(self, greedy: Sequence[bool]) -> Plan:
        self.steps += 1
        if self.steps % EVERY == 0 and not self.plan.levels:
            self._forget_plans()
        if greedy:
            plan = self._planned(len(greedy), sum(greedy))
            plan = self._explore(plan, len(greedy), sum(greedy)) if self.drafts else plan
            self.plan = plan if plan.levels or self.verifying else self._with_look_ups(plan, len(greedy))
        return self.plan

    def _with_look_ups(self, plan: Plan, requests: int) -> Plan:
        """Plan, occasionally of a few nodes of look-ups, whatever they cost."""
        due = self.looking.setdefault(requests.bit_length(), Backoff(RETRY_AFTER, 2 * RETRY_AFTER)).due()
        return plan._replace(price=0.0, least=0.0, most=TRIED) if due else plan

    def _explore(self, plan: Plan, requests: int, greedy: int) -> Plan:
        """Plan, occasionally replaced to learn about an alternative."""
        kinds = [kind for kind, count in enumerate((requests - greedy, greedy)) if count]
        size = requests.bit_length()
        if not plan.levels:
            if not self.resting.setdefault(size, Backoff(RETRY_AFTER, 2 * RETRY_AFTER)).due():
                return plan
            usual = self._rate(self.deep, requests, greedy / requests, range(1, 1 + DEPTHS)).levels
            for kind in kinds:  # the memory may be outdated
                self.recent[kind].clear()
                self.known[kind] = 0.0
            self._forget_plans()
            plan = self._planned(requests, greedy)
            self.most_levels = 1 + usual
            levels = min(1 + max(1, plan.levels), self.most_levels)
            return self._first(levels, requests, plan.price)._replace(deep=True, few=trial_size(requests))
        if min(self.known[kind] for kind in kinds) < 1:
            levels = min(plan.levels, self.most_levels)
            return plan._replace(levels=levels, deep=True, few=trial_size(requests) if size in self.resting else 0)
        self.resting.pop(size, None)
        self.most_levels = 1 + DEPTHS
        if self.warm_sizes:
            if size not in self.drafting:
                sure = plan.price > SURE * requests / self.plain_step_seconds(requests)
                self.drafting[size] = Backoff(RETRY_AFTER if sure else 2, PROBE_EVERY)
            if self.drafting[size].due(self.probe):
                return plan._replace(levels=0)
        if self.steps % EVERY == 0:
            return plan._replace(levels=1 + plan.levels, deep=True)
        fewer = self.verifying // 2
        if self.warm_sizes and self.steps % EVERY == EVERY // 2 and not self.costs.verify.knows(requests + fewer):
            return plan._replace(most=fewer)  # fewer rows may cost less than is believed
        return plan

    def plain_step_seconds(self, requests: int) -> float:
        """Seconds of a step without drafts."""
        return self.costs.verify.cost(requests) + requests * self.context + max(0.0, self.overhead(drafted=False))

    def overhead(self, *, drafted: bool) -> float:
        """Seconds of a step besides its verification and draft levels."""
        return median(self.overheads[drafted] or self.overheads[not drafted] or [0.0])

    def _planned(self, requests: int, greedy: int) -> Plan:
        """The plan of a batch of so many requests, of which so many are `greedy`."""
        if (requests, greedy) not in self._plans:
            self._plans[requests, greedy] = self._best(requests, greedy / max(1, requests))
        return self._plans[requests, greedy]

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._look_up_pays.clear()

    def look_up_pays(self, greedy: Sequence[bool], nodes: int, *, rows: int = 0) -> bool:
        if not self.plan.price:
            return True
        key = len(greedy), sum(greedy), nodes, rows
        if key not in self._look_up_pays:
            self._look_up_pays[key] = super().look_up_pays(greedy, nodes, rows=rows)
        return self._look_up_pays[key]

    def _best(self, requests: int, greedy: float) -> Plan:
        plain_rate = requests / self.plain_step_seconds(requests)
        resting = self._first(0, requests, plain_rate)
        if any(self.lookup_trees):
            looking = self._rate(self.lookup_trees, requests, greedy, range(1))
            resting = looking if looking.price > plain_rate else resting
        if not self.drafts:
            return resting
        levels = self._rate(self.deep, requests, greedy, range(1, 1 + DEPTHS)).levels
        drafting = self._rate(self.recent, requests, greedy, range(levels, levels + 1))
        if math.log(drafting.price / plain_rate) < MARGIN:  # fewer may pay, before a rest
            drafting = self._rate(self.recent, requests, greedy, range(1, levels + 1))
            levels = drafting.levels
        rate = drafting.price
        if math.log(rate / plain_rate) < MARGIN or math.log(resting.price / rate) > MARGIN:
            return resting
        if min(known for known, share in zip(self.known, (1 - greedy, greedy), strict=True) if share) < 1:
            return self._first(levels, requests, rate)
        return drafting

    def _first(self, levels: int, requests: int, price: float) -> Plan:
        """Plan while it is not known what trees are worth: a node must bring what its row costs, where another row for
        each request is verified."""
        least = self.worth_of_node(requests, requests, price)
        return Plan(levels, price, math.log(least) if least > 0 else -math.inf, least)

    def _rate(self, trees: Sequence[PastTrees], requests: int, greedy: float, levels: Sequence[int]) -> Plan:
        """Plan of the best of these numbers of levels, if all trees of the batch are like these."""
        value, level, chance, falling, weight = self._nodes(trees, greedy)
        deepest = int(level.max(where=weight > 0, initial=0))
        drafts = np.array(levels[: 1 + bisect_left(levels, deepest)])  # one more would cost, and bring nothing
        # up to the last of equal chances: what is cut there keeps all of them
        cuts = np.unique(len(falling) - 1 - np.searchsorted(falling[::-1], falling[_cuts(len(falling))]))
        segment = np.searchsorted(cuts, np.arange(len(value)))
        # [D, C]: sums over the nodes of these levels, up to each cut
        cell = np.searchsorted(drafts, level) * len(cuts) + segment
        shape = 1 + len(drafts), len(cuts)
        brought, number = (
            np.bincount(cell, weights, shape[0] * shape[1]).reshape(shape)[:-1].cumsum(0).cumsum(1)
            for weights in (weight * chance, weight)
        )
        gain, rows = requests * (1 + brought), requests * (1 + number)
        drafting = drafts * self.level(requests) + self.overhead(drafted=True) + mean(self.reading)
        besides = np.where(drafts > 0, drafting, self.overhead(drafted=False))[:, None]
        verifying = self.costs.verify.at(rows)
        if self.sampled and greedy < 1:  # their number is not chosen to fill a tile, but varies
            spread = np.sqrt(rows - requests)
            around = self.costs.verify.at(rows - spread) + self.costs.verify.at(rows + spread)
            verifying = (2 * verifying + around) / 4
        rate = gain / (verifying + self.context * rows + np.maximum(besides, 0.0))
        best, size = divmod(int(rate.argmax()), len(cuts))
        verified = value[: cuts[size] + 1]
        lowest = float(verified[level[: cuts[size] + 1] <= drafts[best]].min(initial=np.inf))
        floor = math.log(lowest) if lowest < np.inf else -math.inf
        return Plan(levels[best], float(rate[best, size]), floor, float(falling[cuts[size]]))

    def _nodes(self, trees: Sequence[PastTrees], greedy: float) -> tuple[NDArray[Any], ...]:
        """Nodes of a request in the order of a cut: value, level, chance, that of a cut, and number of such nodes, all
        [M]."""
        chain = np.arange(1, 1 + DEPTHS)
        unknown = np.zeros(DEPTHS)
        parts = [(np.full(DEPTHS, np.inf), chain, PRIOR_ACCEPTANCE**chain, PRIOR_ACCEPTANCE**chain, unknown)]
        for kind, share in enumerate((1 - greedy, greedy)):
            known, calibration = self.known[kind], self.calibrations[kind]
            unknown += share * (1 - known)
            for past_trees, part in ((trees[kind], known), (self.lookup_trees[kind], 1 - known)):
                if past_trees and share:
                    nodes = past_trees.nodes(calibration)
                    parts.append((*nodes[:-1], share * part * nodes.weight))
        value, level, chance, falling, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(-falling, kind="stable")
        return value[order], level[order], chance[order], falling[order], weight[order]

    def observe_trees(
        self, value: ArrayLike, depth: ArrayLike, greedy: ArrayLike, plan: Plan, *, level: ArrayLike | None = None
    ) -> None:
        values, depths, kinds = np.asarray(value), np.asarray(depth), np.asarray(greedy)
        levels = depths if level is None else np.asarray(level)
        for kind, lookup_trees in enumerate(self.lookup_trees):
            chosen = kinds == kind
            count = int(np.count_nonzero(chosen))
            if not count:
                continue
            columns = values, depths, levels
            tree = columns if count == len(kinds) else tuple(column[chosen] for column in columns)
            if level is not None:
                if not lookup_trees:
                    self._forget_plans()
                lookup_trees.append(np.where(tree[2] == 0, tree[0], 0), *tree[1:], levels=0)
            if not plan.levels:
                continue
            self.known[kind] = min(1.0, self.known[kind] + min(count / MIN_TREES, 1 / MIN_STEPS))
            if plan.deep:
                self._forget_plans()
            self.recent[kind].append(*tree, levels=plan.levels)
            if plan.deep:
                self.deep[kind].append(*tree, levels=plan.levels)

    def observe_step(
        self, rows: int, context: float, forward: float, rest: float, *, drafted: bool | None, reading: float = 0
    ) -> None:
        seconds = min(context * self.costs.context, forward / 2 / max(1, rows))
        self.contexts.append(seconds)
        self.context = median(self.contexts)
        _observe(self.costs.verify, rows, forward - rows * seconds, self.warm_sizes)
        if drafted:
            self.reading.append(reading)
        if drafted is not None:
            self.overheads[drafted].append(rest)

    def observe_level(self, requests: int, rows: int, seconds: float) -> None:
        _observe(self.costs.draft, rows, seconds, self.warm_levels)
        if self.plan.floor > -math.inf:  # else the level read what no plan would
            self.width += (rows / requests - self.width) / LAST

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


def _observe(curve: Curve, rows: int, seconds: float, warm: set[int]) -> None:
    """Record a forward. `warm`: row counts that have run before."""
    if rows in warm:
        curve.observe(rows, seconds)
    else:
        curve.observe_first(rows, seconds)
        warm.add(rows)


@lru_cache(2 * SIZES)
def _cuts(nodes: int) -> NDArray[np.int64]:
    """Nodes after which a cut is considered [C], the last one among them."""
    return np.unique(np.linspace(0, nodes - 1, SIZES).astype(int))


NAMES = {True: "drafting", False: "plain"}
"""Names in a file of the kinds of steps that have an overhead."""
