"""What a batch drafts and verifies in a step, decided from the steps before."""

import math

import torch
from torch import Tensor

from vllm_adaptive_tree.budget.allocation import allocate
from vllm_adaptive_tree.budget.calibration import Calibration
from vllm_adaptive_tree.budget.curve import Curve

STEP = 0.2
"""Weight of the newest step in a running average."""
REST, LONGEST_REST = 64, 2048
"""Steps without drafts, which are tokens of every request: after the first loss, and after the last of many."""


class Controller:
    """The budget of a batch; host side, on rank 0.

    A step costs the forward over all its rows and some overhead; a drafting step also costs its drafts. Where the trees
    that pay best do not make up for that, the batch rests from drafting, each time twice as long, and is then tried
    again for a step. What is known of a batch of one size (by powers of two) says nothing of the others.
    """

    def __init__(self, verify: Curve, *, sampled: bool, most: int | None = None):
        """`verify`: seconds by rows. `sampled`: whether children are drawn. `most`: nodes of the whole batch, which
        makes it a fixed budget."""
        self.verify, self.sampled, self.most = verify, sampled, most
        self.calibration = Calibration()
        self.overhead = 0.0
        """Seconds of a step besides drafts and the forward."""
        self.drafting: dict[int, float] = {}  # by size: seconds of drafting, averaged over past steps
        self.advantage: dict[int, float] = {}  # by size: log of tokens per second with drafts over without
        self.rest: dict[int, int] = {}  # by size: steps left
        self.last_rest: dict[int, int] = {}

    def drafts(self, requests: int) -> bool:
        """Whether this step drafts; counts a step of rest."""
        size = requests.bit_length()
        left = self.rest.get(size, 0)
        self.rest[size] = max(0, left - 1)
        return left == 0

    def share(self, value: Tensor, depth: Tensor, spent: float, *, judged: bool = True) -> Tensor:
        """How many nodes of each tree to verify, [R].

        Args:
            value: [R, N] what the proposer puts on each node before it knows its token; 0 where there is none.
            depth: [R, N].
            spent: seconds of drafting them.
            judged: these seconds are those of every step; nothing had to be caught up on.
        """
        chance = self.calibration(value, depth)
        if self.most is not None:
            return allocate(chance, verify=FREE, spent=1.0, sampled=self.sampled, most=self.most)
        requests = len(value)
        size = requests.bit_length()
        # How long drafting took depends on the tokens drawn, also on those behind the cut: only past steps may tell.
        usual = self.drafting.get(size, 0.0) if self.sampled else spent
        kept = allocate(chance, verify=self.verify, spent=usual + self.overhead, sampled=self.sampled)
        taken = torch.arange(value.shape[1]) < kept[:, None]
        rows = torch.tensor([requests, requests + int(kept.sum())])
        without, within = (self.verify.at(rows) + self.overhead).tolist()
        gain = 1 + float(chance.cummin(1).values[taken].sum()) / requests
        if judged:
            old = self.drafting.get(size, spent)
            self.drafting[size] = old + STEP * (spent - old)
            self._learn(size, math.log(gain * without / (within + spent)))
        return kept

    def _learn(self, size: int, advantage: float) -> None:
        old = self.advantage.get(size, advantage)
        self.advantage[size] = now = old + STEP * (advantage - old)
        if now >= 0:
            self.last_rest.pop(size, None)
            return
        self.rest[size] = self.last_rest[size] = min(LONGEST_REST, 2 * self.last_rest.get(size, REST // 2))

    def observe(self, rows: int, forward: float, overhead: float) -> None:
        """A step of `rows` rows took these seconds."""
        self.verify.observe(rows, forward)
        self.overhead += STEP * (min(overhead, 4 * self.overhead or overhead) - self.overhead)


FREE = Curve(torch.tensor([0, 1]), torch.tensor([1e-9, 1e-9]))
