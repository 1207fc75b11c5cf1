"""Trees of what a text has said before: weighted continuations, merged by their common beginnings; no model is run."""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters.base import Rows


class Continuations(NamedTuple):
    tokens: Tensor  # [R, M, K], -1 behind the end
    weight: Tensor  # [R, M], 0: there is none
    through: Tensor  # [R, S, M] bool: which continuations pass through each slot given so far, the root's first
    depth: Tensor  # [R, S]


class Lookup:
    """The law behind a node is the weight of the continuations that go on from there, by their next token. A node of
    none has no children."""

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    def begin(self, tokens: Tensor, weight: Tensor) -> tuple[Rows, Continuations]:
        """Of R requests M continuations each, `tokens` [R, M, K] and `weight` [R, M] as in `Continuations`."""
        through = torch.ones_like(weight, dtype=torch.bool)[:, None]
        depth = torch.zeros_like(tokens[:, :1, 0])
        state = Continuations(tokens, weight, through, depth)
        return self._rows(state, through, depth), state

    def grow(self, tokens: Tensor, parent: Tensor, state: Continuations) -> tuple[Rows, Continuations]:
        above = state.depth.gather(1, parent)
        through = state.through.gather(1, parent[:, :, None].expand(-1, -1, state.through.shape[2]))
        through = through & (_next(state.tokens, above) == tokens[:, :, None]) & (tokens >= 0)[:, :, None]
        depth = above + 1
        together = torch.cat([state.through, through], 1), torch.cat([state.depth, depth], 1)
        return self._rows(state, through, depth), state._replace(through=together[0], depth=together[1])

    def _rows(self, state: Continuations, through: Tensor, depth: Tensor) -> Rows:
        token = _next(state.tokens, depth)  # [R, W, M]
        weight = torch.where(through & (token >= 0), state.weight[:, None], 0.0)
        law = weight.new_zeros(*depth.shape, self.vocabulary).scatter_add_(2, token.clamp(min=0), weight)
        return Rows(law.log_(), dead=weight.sum(2) <= 0)


def _next(tokens: Tensor, depth: Tensor) -> Tensor:
    """[R, W, M]: the token of every continuation [R, M, K] behind so many `depth` [R, W] of its tokens; -1: none."""
    last = tokens.shape[2]
    at = depth.clamp(max=last - 1)[:, None].expand(-1, tokens.shape[1], -1)
    return tokens.gather(2, at).transpose(1, 2).masked_fill((depth >= last)[:, :, None], -1)
