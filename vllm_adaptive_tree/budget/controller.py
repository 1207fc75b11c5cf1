"""What a batch drafts and verifies in a step, decided from the steps before."""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_adaptive_tree.budget.allocation import LEAST, allocate, outcome
from vllm_adaptive_tree.budget.calibration import DEPTHS, Calibration
from vllm_adaptive_tree.budget.costs import Costs
from vllm_adaptive_tree.budget.curve import Curve
from vllm_adaptive_tree.budget.foresight import Foresight
from vllm_adaptive_tree.budget.levels import ALL, Levels

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
REST, LONGEST_REST = 64, 2048
"""Steps without drafts, which are tokens of every request: after the first loss, and after the last of many."""


class Size:
    """What is known of batches of one size (by powers of two) and mix; it says nothing of the others."""

    def __init__(self, level: float = 0.0) -> None:
        """`level`: what is known of it beforehand, 0: nothing."""
        self.drafting: float | None = None
        """Seconds of drafting a step's trees, averaged over past steps."""
        self.besides = 0.0
        """Seconds of a step for what is not drafted in every step: prompts and gaps that the draft reads. Averaged."""
        self.advantage = 0.0
        """Log of tokens per second with drafts over without, averaged since the last rest."""
        self.judged = 0
        """Steps in that average."""
        self.rate = 0.0
        """Tokens per second with drafts."""
        self.level = level
        """Seconds of a draft level."""
        self.levels = Levels()
        self.least: float | None = None
        """Log of the least value that a step verifies, averaged."""
        self.rest = 0
        """Steps without drafts that are left."""
        self.last_rest = REST // 2
        self.trying = False
        """Whether it has drafted since the last rest."""

    def begin_rest(self) -> None:
        """Twice as long as the last one."""
        self.rest = self.last_rest = min(LONGEST_REST, 2 * self.last_rest)
        self.judged, self.trying = 0, False


class Controller:
    """The budget of a batch; host side, on rank 0.

    A step costs the forward over all its rows and some overhead; a drafting step also costs its drafts. Where the trees
    that pay best do not make up for that, the batch rests from drafting, each time twice as long, and is then tried
    again for some steps, unless recent trees of other batches say that it would lose.
    """

    def __init__(self, costs: Costs, *, sampled: bool, most: int | None = None):
        """`sampled`: whether children are drawn. `most`: nodes of the whole batch, which makes it a fixed budget."""
        self.costs, self.sampled, self.most = costs, sampled, most
        self.verify = costs.verify
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

    def of(self, requests: int) -> Size:
        key = requests.bit_length(), self.mix
        if key not in self.sizes:
            self.sizes[key] = Size(0.0 if self.costs.draft is None else self.costs.draft.cost(requests))
        return self.sizes[key]

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
        if self._hopeless(requests):
            return False
        size = self.of(requests)
        if not (size.rest or size.trying):
            if self._would_lose(requests):
                size.begin_rest()
            else:
                size.trying = True
        left, size.rest = size.rest, max(0, size.rest - 1)
        return left == 0

    def _hopeless(self, requests: int) -> bool:
        """Whether chains of which every token is accepted would not pay, by the costs of the start: nothing to try."""
        if self.most is not None or self.costs.draft is None:
            return False
        level = self.of(requests).level
        plain = self.verify.cost(requests) + self.overhead
        return all(
            (1 + depth) * plain < self.verify.cost((1 + depth) * requests) + self.overhead + depth * level
            for depth in range(1, 1 + DEPTHS)
        )

    def _would_lose(self, requests: int) -> bool:
        """Whether trees like the recent ones would not make up for their drafting in a batch of so many requests."""
        if self.most is not None or self.costs.draft is None:
            return False
        found = self.foresight[self.mix].best_rate(
            requests, self.steps, verify=self.verify, overhead=self.overhead, level=self.of(requests).level
        )
        if found is None:
            return False
        plain = requests / (self.verify.cost(requests) + self.overhead)
        return math.log(found / plain) < MARGIN

    def depth(self, requests: int) -> int:
        """The most levels that this step drafts."""
        return ALL if self.most is not None else self.of(requests).levels.next()

    def threshold(self, requests: int, trees: int) -> float:
        """What a level has to add to the expected acceptance of each of these trees of a batch, in tokens: mu times the
        best rate in OPT-Tree's terms (arXiv 2406.17276)."""
        size = self.of(requests)
        return size.level * size.rate / trees

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
                size.levels.observe(self._rates(everyone, depth, spent, size.level, levels))
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
        brings more than other steps bring in its time.

        Args:
            value, depth, greedy: as in `share`, of the nodes that it kept; depth 0 where there is none.
            rows: besides roots and nodes of these trees: prompts, and requests that have no tree.
        """
        rate = self.of(len(value)).rate
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
        without, within = (self.verify.cost(rows) + self.overhead for rows in (requests, requests + len(taken)))
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
            return
        size.begin_rest()

    def take(self) -> tuple[float, float]:
        """Accepted nodes that were expected, and those observed, since the last call."""
        now = sum(one.predicted for one in self.calibrations), sum(one.observed for one in self.calibrations)
        taken, self.taken = (now[0] - self.taken[0], now[1] - self.taken[1]), now
        return taken

    def observe(self, rows: int, context: int, forward: float, elsewhere: float) -> None:
        """A step of `rows` rows behind `context` tokens of all requests took these seconds."""
        self.reading = min(context * self.costs.context, forward / 2)
        if rows in self.met:
            self.verify.observe(rows, forward - self.reading)
        self.met.add(rows)
        self.elsewhere += STEP * (min(elsewhere, 4 * self.elsewhere or elsewhere) - self.elsewhere)

    def drafted(self, requests: int, seconds: float) -> None:
        """One draft level of a batch took these seconds, forward and choice of nodes."""
        size = self.of(requests)
        size.level += (STEP if size.level else 1) * (min(seconds, 4 * size.level or seconds) - size.level)


def _taken(chance: Tensor, kept: Tensor) -> list[float]:
    """The chances of the first `kept` [R] nodes of each list [R, N]; none counts for more than one before it."""
    taken: list[float] = []
    for chances, count in zip(chance.tolist(), kept.tolist(), strict=True):
        taken += accumulate(chances[:count], min)
    return taken


FREE = Curve([0, 1], [1e-9, 1e-9])
"""For a fixed budget, which asks no cost."""
