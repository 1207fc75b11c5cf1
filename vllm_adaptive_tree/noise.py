"""Randomness, the only way in: three questions, answered by numbers that are a function of a key."""

from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.rows import CHUNK, chunk_sums, inside

NOTHING = 1e-12
"""A law of which no more than this share is left counts as used up: less than what rounding leaves behind."""

BLOCK = 16  # numbers made by one pass


class Noise(Protocol):
    """Every call returns an answer independent of all others."""

    def at(self, key: Tensor) -> Self:
        """The noise of one place of each request (a node, a slot); `key` [R, ...] must differ between places."""
        ...

    def accept(self, probability: Tensor) -> Tensor:
        """[R, ...] -> bool of that shape: true with the given probability."""
        ...

    def choose(self, law: Tensor) -> Tensor:
        """[R, ..., V] -> [R, ...]: a token drawn from the law, which need not sum to 1."""
        ...

    def draw_without_replacement(self, law: Tensor, k: int) -> Tensor:
        """[R, ..., V] -> [R, ..., k] different tokens in the order of the draws; -1 where no mass is left."""
        ...


class KeyedNoise:
    """Noise keyed by (seed, position of the root, purpose, place, number of the call).

    Nothing is stored between steps, so a step gives the same answers whatever happened to the batch around it.
    """

    def __init__(self, seed: Tensor, position: Tensor, purpose: int):
        """`seed`, `position` [R] int64. Two objects with different purposes are independent."""
        self.seed, self.position, self.purpose = seed, position, purpose
        self.coins = self.draws = 0
        self.blocks: dict[int, Tensor] = {}

    @cached_property
    def key(self) -> Tensor:
        return _mix(_mix(self.seed) + self.position * 8 + self.purpose)

    def at(self, key: Tensor) -> Self:
        bound = object.__new__(type(self))
        base = self.key.view(-1, *[1] * (key.dim() - 1))
        bound.key, bound.coins, bound.draws, bound.blocks = _mix(base + _mix(key)), 0, 0, {}
        return bound

    def accept(self, probability: Tensor) -> Tensor:
        self.coins += 1  # counted apart: columns without a child must not change the draw behind them
        return self._uniform(2 * self.coins).expand(probability.shape) < probability

    def choose(self, law: Tensor) -> Tensor:
        sums = chunk_sums(law)
        chunk, _, at = self._draw(law, sums, sums.new_empty(*sums.shape[:-1], 0, dtype=torch.int64))
        return (chunk * CHUNK + at)[..., 0].clamp_(max=law.shape[-1] - 1)  # of nothing, or of NaN, the last token

    def draw_without_replacement(self, law: Tensor, k: int) -> Tensor:
        sums = chunk_sums(law)
        nothing = NOTHING * sums.sum(-1, keepdim=True)
        drawn = torch.full((*law.shape[:-1], k), -1, device=law.device)
        for i in range(k):
            chunk, entries, at = self._draw(law, sums, drawn[..., :i])
            token = chunk * CHUNK + at
            drawn[..., i : i + 1] = token.masked_fill_(~(sums.sum(-1, keepdim=True) > nothing), -1)
            sums.scatter_(-1, chunk, entries.scatter_(-1, at, 0.0).sum(-1, keepdim=True))
        return drawn

    def _draw(self, law: Tensor, sums: Tensor, gone: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """First the chunk, then the token in it: one number, the inverse of the cumulative law without those `gone`.

        Returns:
            The chunk [..., 1], its entries [..., 64] and the place of the token among them [..., 1].
        """
        reach = sums.cumsum(-1)
        self.draws += 1
        target = reach[..., -1:] * self._uniform(2 * self.draws + 1).expand(reach.shape[:-1])[..., None]
        chunk = _token_at(reach, target)
        before = reach.gather(-1, chunk) - sums.gather(-1, chunk)
        entries = inside(law, chunk, gone, 0.0)
        return chunk, entries, _token_at(entries.cumsum(-1), (target - before).clamp_(min=0))

    def _uniform(self, number: int) -> Tensor:
        """In [0, 1), of the key's shape, float64; made for several numbers at once."""
        block, column = divmod(number, BLOCK)
        if block not in self.blocks:
            numbers = torch.arange(block * BLOCK, (block + 1) * BLOCK, device=self.key.device)
            bits = _mix(self.key[..., None] + numbers) >> 11 & (1 << 53) - 1
            self.blocks[block] = bits.double() * 2.0**-53
        return self.blocks[block][..., column]


def _token_at(reach: Tensor, target: Tensor) -> Tensor:
    """The token whose interval of the cumulative law `reach` [..., V] holds `target` [..., 1]."""
    inside = torch.minimum(target, torch.nextafter(reach[..., -1:], torch.zeros_like(target)))
    return torch.searchsorted(reach, inside, right=True).clamp_(max=reach.shape[-1] - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit numbers whose outputs pass for random."""
    x = x + -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)
