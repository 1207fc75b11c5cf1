"""The budget controller: what a batch drafts and verifies in a step, decided from past steps."""

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_adaptive_tree.budget.allocation import LEAST, allocate, outcome
from vllm_adaptive_tree.budget.calibration import DEPTHS, Calibration
from vllm_adaptive_tree.budget.costs import Costs
from vllm_adaptive_tree.budget.curve import Curve
from vllm_adaptive_tree.budget.foresight import Foresight
from vllm_adaptive_tree.budget.levels import ALL
from vllm_adaptive_tree.budget.reading import member, number, short
from vllm_adaptive_tree.budget.size import LONGEST_REST, REST, Size

STEP = 0.2
"""Weight of the newest step in a running average."""
PATIENCE = 0.05
"""The same for whether drafting pays: a few poor steps of one request say little."""
TRIAL = 12
"""Steps after which that is judged."""
MARGIN = 0.05
"""Of tokens per second, in logs: what drafts have to bring, because costs are known no better."""
SLACK = 0.5
"""Of the least value that is verified: what is worth less has no children drafted."""
DOUBT = 3.0
"""Until so many levels were drafted as a trial has steps, what drafts cost may be as much less than measured."""


class Controller:
    """The budget of a batch; host side, on rank 0.

    A step costs the forward over all its rows and some overhead; a drafting step also costs its drafts. Where the trees
    that pay best do not make up for that, the batch rests from drafting, each time twice as long, and is then tried
    again for some steps, unless recent trees of other batches say that it would lose. Costs are those of live steps as
    soon as there are some: of a verification, of a draft level, and of a step without drafts, for which a batch that
    drafts leaves its drafts out now and then.
    """

    def __init__(self, costs: Costs, *, sampled: bool, most: int | None = None):
        """`sampled`: whether children are drawn. `most`: nodes of the whole batch, which makes it a fixed budget."""
        self.costs, self.sampled, self.most = costs, sampled, most
        self.verify, self.draft = costs.verify, costs.draft
        self.probe = 3
        """Steps without drafts of a look at what they take."""
        self.levels_seen = 0
        self.calibrations = Calibration(), Calibration()
        """Of sampled requests, and of greedy ones: one value is not one chance to both."""
        self.taken = 0.0, 0.0
        self.mix = 0
        """Which requests this step has: 0 sampled ones, 2 greedy ones, 1 both."""
        self.met: set[int] = set()
        """Rows of the forwards so far: the first of so many also makes the kernels for them."""
        self.elsewhere = self.reading = 0.0
        """Seconds of a step besides drafts and the forward, and of reading the contexts in the last step."""
        self.sizes: dict[tuple[int, int], Size] = {}
        self.foresight = Foresight(sampled=sampled), Foresight(sampled=sampled), Foresight(sampled=sampled)
        """By mix."""
        self.steps = 0
        self.rate_beside = 0.0
        """Tokens per second of a batch like the last one that was shared, before its own trees were judged."""

    def of(self, requests: int) -> Size:
        key = requests.bit_length(), self.mix
        if key not in self.sizes:
            self.sizes[key] = Size()
        return self.sizes[key]

    def level(self, requests: int) -> float:
        """Seconds of a draft level: of live steps, or as measured at the start; 0 where nothing is known."""
        live = self.of(requests).level
        if live is not None:
            return live
        return 0.0 if self.draft is None else self.draft.cost(requests)

    def without(self, requests: int) -> float:
        """Seconds of a step without drafts: of live ones of about this size, or by the costs."""
        plain = self.of(requests).plain
        if not plain:
            return self.verify.cost(requests) + self.overhead
        own = self.verify.cost(requests)
        return median(seconds * own / self.verify.cost(of) for of, seconds in plain) + self.reading

    def begin(self, greedy: Sequence[bool]) -> None:
        """A step of these requests."""
        self.mix = round(2 * sum(greedy) / max(1, len(greedy)))

    @property
    def overhead(self) -> float:
        """Seconds of a step that its nodes do not change."""
        return self.elsewhere + self.reading

    def drafts(self, requests: int) -> bool:
        """Whether this step drafts; counts a step of rest."""
        self.steps += 1
        size = self.of(requests)
        if not (size.rest or size.trying):
            # The last of many rests ends with a trial in any case: what is believed may be of another time.
            if size.last_rest < LONGEST_REST and (self._hopeless(requests) or self._would_lose(requests)):
                size.begin_rest()
            else:
                size.trying = True
        elif size.trying and not size.rest and self.met and self.most is None:
            size.probe(self.probe)
        left, size.rest = size.rest, max(0, size.rest - 1)
        return left == 0

    def _hopeless(self, requests: int) -> bool:
        """Whether chains of which every token is accepted would not pay."""
        if self.most is not None or self.draft is None:
            return False
        level, plain, rows = self.level(requests), self.without(requests), self.verify.cost(requests)
        doubt = DOUBT if self.levels_seen < TRIAL else 1.0
        return all(
            depth * plain < (self.verify.cost((1 + depth) * requests) - rows + depth * level) / doubt
            for depth in range(1, 1 + DEPTHS)
        )

    def _would_lose(self, requests: int) -> bool:
        """Whether trees like the recent ones would not make up for their drafting in a batch of so many requests."""
        if self.most is not None or self.draft is None:
            return False
        found = self.foresight[self.mix].best_rate(
            requests, self.steps, verify=self.verify, overhead=self.overhead, level=self.level(requests)
        )
        return found is not None and math.log(found * self.without(requests) / requests) < MARGIN

    def depth(self, requests: int) -> int:
        """The most levels that this step drafts."""
        return ALL if self.most is not None else self.of(requests).levels.next()

    def threshold(self, requests: int, trees: int) -> float:
        """What a level has to add to the expected acceptance of each of these trees of a batch, in tokens: mu times the
        best rate in OPT-Tree's terms (arXiv 2406.17276)."""
        return self.level(requests) * self.of(requests).rate / trees

    def floor(self, requests: int) -> float:
        """Log value up to which a node's children are not worth drafting: no child is worth more than its parent, and
        the batch verifies none of so little."""
        least = None if self.most is not None else self.of(requests).least
        return -math.inf if least is None else least + math.log(SLACK)

    def share(
        self,
        value: Tensor,
        depth: Tensor,
        spent: float,
        *,
        greedy: Tensor | None = None,
        others: int = 0,
        levels: int = 0,
        judged: bool = True,
    ) -> Tensor:
        """How many nodes of each tree to verify, [R].

        Args:
            value: [R, N] what the proposer puts on each node before it knows its token; 0 where there is none.
            depth: [R, N].
            spent: seconds of drafting them.
            greedy: [R] bool; none unless told.
            others: requests of the batch that drafted nothing.
            levels: forwards of the draft behind the one that read the roots.
            judged: these seconds are those of every step; neither prompts nor gaps had to be read.
        """
        chance = self._chance(value, depth, greedy)
        if self.most is not None:
            return allocate(chance, verify=FREE, spent=1.0, sampled=self.sampled, most=self.most)
        self.foresight[self.mix].see(self.steps, chance, depth)
        trees, requests = len(value), len(value) + others
        size = self.of(requests)
        self.rate_beside = size.rate
        # How long drafting took depends on the tokens drawn, also on those behind the cut: only past steps may tell.
        usual = (size.drafting or 0.0) if self.sampled else spent
        everyone = pad(chance, (0, 0, 0, others)) if others else chance
        kept = allocate(everyone, verify=self.verify, spent=usual + self.overhead, sampled=self.sampled)[:trees]
        verified = value[torch.arange(value.shape[1]) < kept[:, None]]
        if len(verified):
            least = math.log(max(float(verified.min()), LEAST))
            size.least = least if size.least is None else size.least + STEP * (least - size.least)
        besides = 0.0 if judged or size.drafting is None else max(0.0, spent - size.drafting)
        size.besides += PATIENCE * (besides - size.besides)
        if judged:
            self._judge(size, requests, _taken(chance, kept), spent)
            if size.levels.judges and levels:
                size.levels.observe(self._rates(everyone, depth, spent, self.level(requests), levels))
        return kept

    def _rates(self, chance: Tensor, depth: Tensor, spent: float, level: float, levels: int) -> list[float]:
        """Tokens per second of a step, had it drafted none of its `levels` below the roots', one, .., all of them.

        Args:
            chance: [R, N], requests without a tree included, behind the others.
            depth: [T, N] of the T trees.
            spent: seconds of drafting in which all levels were drafted, of `level` seconds each.
        """
        falling = chance.cummin(1).values
        rates = []
        for below in range(levels + 1):
            known = falling.clone()
            known[: len(depth)].masked_fill_(depth > 1 + below, 0.0)
            drafting = max(0.0, spent - (levels - below) * level)
            tokens, seconds = outcome(known, verify=self.verify, spent=self.overhead + drafting, sampled=self.sampled)
            rates.append(tokens / seconds)
        return rates

    def share_beside(self, value: Tensor, depth: Tensor, rows: int, *, greedy: Tensor | None = None) -> Tensor:
        """How many nodes of each tree to verify in a step that also reads prompts, [R].

        Prompts have to be read in any case; there a row often costs more than in other steps, and a node pays where it
        brings more than other steps bring in its time: steps before these trees, whose drawn tokens have no say in
        their own cut.

        Args:
            value, depth, greedy: as in `share`, of the nodes that it kept; depth 0 where there is none.
            rows: besides roots and nodes of these trees: prompts, and requests that have no tree.
        """
        rate = self.rate_beside
        if self.most is not None or not rate:
            return (depth > 0).sum(1)
        chance = self._chance(value, depth, greedy)
        return allocate(chance, verify=self.verify, spent=0.0, sampled=self.sampled, rows=rows, rate=rate)

    def _chance(self, value: Tensor, depth: Tensor, greedy: Tensor | None) -> Tensor:
        sampled, certain = self.calibrations
        known = 0 if greedy is None else int(greedy.sum())
        if greedy is None or known == 0:
            return sampled(value, depth)
        if known == len(greedy):
            return certain(value, depth)
        return torch.where(greedy[:, None], certain(value, depth), sampled(value, depth))

    def _judge(self, size: Size, requests: int, taken: list[float], spent: float) -> None:
        """`taken`: the chance of every node that is verified."""
        without, within = self.without(requests), self.verify.cost(requests + len(taken)) + self.overhead
        tokens = requests + sum(taken)
        rate = tokens / (within + spent)
        size.rate += (STEP if size.rate else 1) * (rate - size.rate)
        if size.drafting is None:
            size.drafting = spent
        if size.levels.deeper:
            return  # deeper than the other steps
        size.drafting += STEP * (spent - size.drafting)
        self._learn(size, math.log(tokens / requests * without / (within + spent + size.besides)))

    def _learn(self, size: Size, advantage: float) -> None:
        size.judged += 1
        size.advantage += max(PATIENCE, 1 / size.judged) * (advantage - size.advantage)
        if size.judged < TRIAL:
            return
        if size.advantage >= MARGIN:
            size.last_rest = REST // 2
        else:
            size.begin_rest()

    def take(self) -> tuple[float, float]:
        """Accepted nodes that were expected, and those observed, since the last call."""
        now = sum(one.predicted for one in self.calibrations), sum(one.observed for one in self.calibrations)
        taken, self.taken = (now[0] - self.taken[0], now[1] - self.taken[1]), now
        return taken

    def observe(self, rows: int, context: int, forward: float, elsewhere: float, *, requests: int = 0) -> None:
        """A step of `rows` rows behind `context` tokens of all `requests` took these seconds; with a row for each it
        was one without drafts."""
        self.reading = min(context * self.costs.context, forward / 2)
        if rows in self.met:
            self.verify.observe(rows, forward - self.reading)
            if rows == requests:
                self.of(requests).plain.append((requests, forward - self.reading + elsewhere))
        self.met.add(rows)
        self.elsewhere += STEP * (min(elsewhere, 4 * self.elsewhere or elsewhere) - self.elsewhere)

    def drafted(self, requests: int, seconds: float) -> None:
        """One draft level of a batch took these seconds, forward and choice of nodes."""
        size, believed = self.of(requests), self.level(requests)
        size.level = believed + (STEP if believed else 1) * (min(seconds, 4 * believed or seconds) - believed)
        self.levels_seen += 1
        if self.draft is not None:
            self.draft.observe(requests, seconds)

    def to_json(self) -> dict[str, Any]:
        """What was learnt, for another process."""
        sizes = [{"requests": bits, "mix": mix, **size.to_json()} for (bits, mix), size in self.sizes.items()]
        return {
            "calibrations": [one.to_json() for one in self.calibrations],
            "elsewhere": short([self.elsewhere])[0],
            "levels_seen": min(self.levels_seen, TRIAL),
            "sizes": sizes,
        }

    def restore(self, data: Any) -> None:
        """What `to_json` gave. Raises ValueError where `data` is something else."""
        for one, known in zip(self.calibrations, member(data, "calibrations"), strict=True):
            one.restore(known)
        self.elsewhere = number(member(data, "elsewhere"))
        self.levels_seen = int(number(member(data, "levels_seen")))
        for size in member(data, "sizes"):
            key = int(number(member(size, "requests"), 1, 64)), int(number(member(size, "mix"), 0, 2))
            self.sizes[key] = Size.from_json(size)


def _taken(chance: Tensor, kept: Tensor) -> list[float]:
    """The chances of the first `kept` [R] nodes of each list [R, N]; none counts for more than one before it."""
    taken: list[float] = []
    for chances, count in zip(chance.tolist(), kept.tolist(), strict=True):
        taken += accumulate(chances[:count], min)
    return taken


FREE = Curve([0, 1], [1e-9, 1e-9])
"""For a fixed budget, which asks no cost."""
