"""Enumeration of a random procedure's outcomes, with their probabilities: a random source that takes every branch."""

from collections.abc import Callable, Iterator
from typing import Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_adaptive_tree.rng import EXHAUSTED

T = TypeVar("T")


class ForkingRandom:
    """A random source of R worlds: each follows its script of decisions, then takes the first open branch."""

    def __init__(self, script: Tensor):
        self._script = script  # [R, S] ways, -1: open
        self._ways: list[Tensor] = []  # of every decision so far: [R, M]
        self._chances: list[Tensor] = []  # [R, M, ways]

    def fold_in(self, key: Tensor) -> Self:
        return self

    def accept(self, probability: Tensor) -> Tensor:
        return self._decide(torch.stack([probability, 1 - probability], -1)) == 0

    def sample(self, probs: Tensor) -> Tensor:
        return self._decide(probs)

    def sample_without_replacement(self, probs: Tensor, k: int) -> Tensor:
        drawn, left = [], probs
        for _ in range(k):
            token = self._decide(left)
            drawn.append(token.masked_fill(left.sum(-1) <= EXHAUSTED * probs.sum(-1), -1))
            left = left.scatter(-1, token[..., None], 0.0)
        return torch.stack(drawn, -1)

    def _decide(self, weights: Tensor) -> Tensor:
        """Choose a way: [R, ..., ways] -> [R, ...]; one of less than rounding's weight is closed."""
        chances = weights.double().flatten(1, -2) if weights.dim() > 2 else weights.double()[:, None]  # [R, M, ways]
        chances = chances / chances.sum(-1, keepdim=True)
        certain = torch.eye(chances.shape[-1], dtype=chances.dtype)[0]  # of nothing, one thing
        chances = torch.where(chances.isfinite().all(-1, keepdim=True) & (chances > EXHAUSTED), chances, 0.0)
        chances = torch.where(chances.sum(-1, keepdim=True) > 0, chances, certain)
        start = sum(ways.shape[1] for ways in self._ways)
        script = self._script[:, start : start + chances.shape[1]]
        script = pad(script, (0, chances.shape[1] - script.shape[1]), value=-1)
        ways = torch.where(script >= 0, script, (chances > 0).int().argmax(-1))
        self._ways.append(ways)
        self._chances.append(chances)
        return ways.view(weights.shape[:-1])

    def _all(self) -> tuple[Tensor, Tensor]:
        """Ways [R, D] and chances [R, D, ways] of all decisions."""
        most = max((chances.shape[2] for chances in self._chances), default=0)
        chances = [pad(chances, (0, most - chances.shape[2])) for chances in self._chances]
        return torch.cat(self._ways, 1), torch.cat(chances, 1)

    def weight(self) -> Tensor:
        """Probability of each world's decisions, [R]."""
        if not self._ways:
            return torch.ones(len(self._script), dtype=torch.float64)
        ways, chances = self._all()
        return chances.gather(2, ways[..., None]).prod(1)[:, 0]

    def others(self) -> tuple[Tensor, Tensor]:
        """Ways not taken, as scripts [R', S'] of worlds to come, and the world [R'] from which each forks off."""
        if not self._ways:
            return torch.empty(0, dtype=torch.int64), self._script[:0]
        ways, chances = self._all()
        decision = torch.arange(ways.shape[1])
        unscripted = pad(self._script, (0, ways.shape[1]), value=-1)[:, : ways.shape[1]] < 0
        other = (chances > 0).scatter(2, ways[..., None], value=False) & unscripted[..., None]
        world, at, way = other.nonzero(as_tuple=True)
        script = torch.where(decision == at[:, None], way[:, None], ways[world])
        return world, script.masked_fill(decision > at[:, None], -1)


def every_outcome(run: Callable[[ForkingRandom, Tensor], T], worlds: int = 1) -> Iterator[tuple[Tensor, Tensor, T]]:
    """Call `run(rng, world [R])` until no decision of any of the `worlds` is left: weight [R], world [R] and the
    result.

    Every outcome occurs in exactly one row; the weights of a world add up to 1.
    """
    world, script = torch.arange(worlds), torch.empty(worlds, 0, dtype=torch.int64)
    while len(world):
        random = ForkingRandom(script)
        result = run(random, world)
        yield random.weight(), world, result
        row, script = random.others()
        world = world[row]
