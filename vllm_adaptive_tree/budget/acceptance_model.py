"""Model of the target's acceptance of drafted nodes, learnt from past steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vllm_adaptive_tree.budget import calibration_loops as loops
from vllm_adaptive_tree.budget.calibration_loops import BINS, DEPTHS, LOWEST
from vllm_adaptive_tree.json_numbers import MAX_NUMBER, member, number, numbers, short

PRIOR, LOOKUP_PRIOR = 6.0, 2.0
"""Weight of the draft's own probability in every bin, in observations; of a look-up's, which knows less."""


class Calibration:
    """Acceptance rate of nodes by source, depth and value: maps a value to an acceptance probability. The depth of a
    look-up's node is negative: the same value means another probability. Values that a method has learnt need it too:
    those verified are the highest of many estimates, so they promise too much.

    It depends on past steps, depth and value only, and never decreases with the value, so pruning by calibrated values
    depends on a sampled token only as far as the value does.
    """

    def __init__(self) -> None:
        # depth 0 and the first and last column hold no observations
        self.trials = np.full((1 + 2 * DEPTHS, BINS + 2), PRIOR)
        self.trials[1 + DEPTHS :] = LOOKUP_PRIOR
        centre = LOWEST ** (1 - (np.arange(BINS) + 0.5) / BINS)
        self.hits = self.trials * np.concatenate([[0.0], centre, [0.0]])  # a bin starts at its nodes' own predictions
        self.chance = np.zeros_like(self.hits)
        self.predicted = self.observed = 0.0
        """Sums over all nodes verified so far: expected and actual acceptances."""
        loops.settle(self.hits, self.trials, self.chance)

    def __call__(self, value: Tensor, depth: Tensor) -> Tensor:
        """Acceptance probability [...] of a node of this value and depth (1: child of the root); 0 for NaN."""
        return torch.from_numpy(self.chances(value.numpy(), depth.numpy()))

    def chances(self, value: ArrayLike, depth: ArrayLike) -> NDArray[np.float64]:
        """Acceptance probabilities of arrays."""
        values = np.ascontiguousarray(value, np.float64)
        found = np.empty_like(values)
        loops.chances(self.chance, values.ravel(), np.ascontiguousarray(depth, np.int64).ravel(), found.ravel())
        return found

    def observe(self, value: ArrayLike, depth: ArrayLike, accepted: ArrayLike) -> None:
        """Record M verified nodes, with `accepted` of each."""
        values, depths = np.ascontiguousarray(value, np.float64), np.ascontiguousarray(depth, np.int64)
        hits = np.ascontiguousarray(accepted, bool)
        predicted, observed = loops.observe(self.hits, self.trials, self.chance, values, depths, hits)
        self.predicted, self.observed = self.predicted + predicted, self.observed + observed

    def to_json(self) -> dict[str, Any]:
        return {"hits": short(self.hits.ravel().tolist()), "trials": short(self.trials.ravel().tolist())}

    def restore(self, data: Any) -> None:
        """Load the output of `to_json`. Raises ValueError, changing nothing, for other data."""
        count = self.hits.size
        trials = np.array(numbers(member(data, "trials"), count, least=1e-3)).reshape(self.hits.shape)
        hits = np.array(numbers(member(data, "hits"), count)).reshape(self.hits.shape)
        if (hits > 1.001 * trials).any():  # numbers are written with six digits
            raise ValueError("more nodes were accepted than verified")
        self.hits, self.trials = hits, trials
        loops.settle(self.hits, self.trials, self.chance)


COLDEST, HOTTEST = 0.2, 2.0
"""Bounds of a draft temperature."""
TOKENS = 1000.0
"""Tokens after which an old one has weight 1/e."""
ROWS = 4
"""Most rows of logits that a step reads on the host: a large batch gives enough, and each costs its vocabulary."""
INFORMATION = 30.0
"""Information of the initial temperature, in squared logits: that of so many tokens at variance 1."""
DEVIATION = 8.0
"""Largest slope of a token, in logits: one that the draft considers impossible carries no more information."""


class DraftTemperature:
    """The draft temperature that best predicts the tokens of a greedy target.

    A greedy target takes its argmax, so the draft's raw distribution is too flat as a prediction. This is a maximum
    likelihood fit of the inverse temperature: the slope of a token's log probability is its logit minus the mean logit,
    the curvature is their variance; one Newton step per engine step, with exponential forgetting.
    """

    def __init__(self, temperature: float):
        self.inverse, self.information, self.turn = 1 / temperature, INFORMATION, 0

    @property
    def temperature(self) -> float:
        return 1 / self.inverse

    def observe(self, logits: Sequence[Tensor], token: Sequence[int]) -> None:
        """Record the `token` that a greedy target took at nodes with the draft's `logits`, each [V]; of many nodes a
        rotating subset."""
        every = max(1, -(-len(logits) // ROWS))
        self.turn += 1
        sampled_rows = slice(self.turn % every, None, every)
        if logits:
            rows, took = torch.stack(list(logits[sampled_rows])), torch.tensor(token[sampled_rows])
            self.learn(*self.measured(rows, took, torch.ones_like(took, dtype=torch.bool)).tolist())

    def measured(self, logits: Tensor, token: Tensor, selected: Tensor) -> Tensor:
        """Arguments of `learn` as a tensor [3] on the logits' device, for the nodes that are `selected` [M]."""
        at = token.clamp(min=0)[:, None]
        selected = selected & (logits.gather(-1, at)[:, 0] > -torch.inf)  # no temperature fits what the draft excludes
        logits = (logits.float() - logits.amax(-1, keepdim=True)).clamp_(min=-1e4)  # banned tokens: -inf
        probs = torch.softmax(logits * self.inverse, -1)
        mean = (probs * logits).sum(-1)
        variance = (probs * logits.square()).sum(-1) - mean.square()
        slope = (logits.gather(-1, at)[:, 0] - mean).clamp(-DEVIATION, DEVIATION)
        return torch.stack(
            [torch.where(selected, values, 0.0).sum() for values in (torch.ones_like(slope), slope, variance)]
        )

    def learn(self, tokens: float, slope: float, variance: float) -> None:
        """Make one Newton step from this many tokens."""
        self.information = self.information * (1 - tokens / TOKENS) + variance
        inverse = self.inverse + slope / self.information
        self.inverse = min(max(inverse, 1 / HOTTEST), 1 / COLDEST)

    def to_json(self) -> dict[str, float]:
        inverse, information = short([self.inverse, self.information])
        return {"inverse": inverse, "information": information}

    def restore(self, data: Any) -> None:
        """Load the output of `to_json`. Raises ValueError, changing nothing, for other data."""
        inverse = number(member(data, "inverse"), 1 / HOTTEST, 1 / COLDEST)
        self.information = number(member(data, "information"), 1e-3, MAX_NUMBER)
        self.inverse = inverse
