"""Look-up drafts: weighted continuations of the text, merged by their common prefixes; no model runs."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters.base import Rows, TextDrafter, Texts


class Continuations(NamedTuple):
    """Continuations of R texts, M each."""

    tokens: Tensor  # [R, M, K], -1 pads
    weight: Tensor  # [R, M], its probability; 0: no continuation

    def only(self, requests: Tensor | None) -> "Continuations":
        """Those of `requests` [R] bool; None: of all."""
        return self if requests is None else self._replace(weight=self.weight * requests[:, None])


class LookupState(NamedTuple):
    """State of trees that read continuations."""

    continuations: Continuations
    through: Tensor  # [R, S, M] bool: the continuations that pass through each slot so far, the root first
    depth: Tensor  # [R, S]


class Lookup(TextDrafter):
    """Look-up draft. The distribution at a node is the weight of the continuations through it, by their next token."""

    length: int | None = None
    """Most tokens of a continuation; None: no bound is known."""

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    @abstractmethod
    def continuations(self, texts: Texts) -> Continuations:
        """Continuations of R texts."""

    def begin(self, texts: Texts) -> tuple[Rows, LookupState]:
        continuations = self.continuations(texts)
        through = torch.ones_like(continuations.weight, dtype=torch.bool)[:, None]
        depth = torch.zeros_like(continuations.tokens[:, :1, 0])
        return self._rows(continuations, through, depth), LookupState(continuations, through, depth)

    def grow(self, tokens: Tensor, parent: Tensor, state: LookupState) -> tuple[Rows, LookupState]:
        continuations, parent_depth = state.continuations, state.depth.gather(1, parent)
        through = state.through.gather(1, parent[:, :, None].expand(-1, -1, state.through.shape[2]))
        through = (
            through & (_next(continuations.tokens, parent_depth) == tokens[:, :, None]) & (tokens >= 0)[:, :, None]
        )
        depth = parent_depth + 1
        rows = self._rows(continuations, through, depth)
        return rows, LookupState(
            continuations, torch.cat([state.through, through], 1), torch.cat([state.depth, depth], 1)
        )

    def _rows(self, continuations: Continuations, through: Tensor, depth: Tensor) -> Rows:
        token = _next(continuations.tokens, depth)  # [R, W, M]
        weight = torch.where(through & (token >= 0), continuations.weight[:, None], 0.0)
        token = token.clamp(min=0)
        shape = (*depth.shape, self.vocabulary)
        total = weight.new_zeros(shape).scatter_add_(2, token, weight).gather(2, token)
        # a logarithm of M entries and not of the whole vocabulary
        return Rows(weight.new_full(shape, -torch.inf).scatter_(2, token, total.log()), dead=weight.sum(2) <= 0)


def _next(tokens: Tensor, depth: Tensor) -> Tensor:
    """Tokens [R, W, M] of every continuation [R, M, K] after its first `depth` [R, W] tokens; -1: none."""
    last = tokens.shape[2]
    at = depth.clamp(max=last - 1)[:, None].expand(-1, tokens.shape[1], -1)
    return tokens.gather(2, at).transpose(1, 2).masked_fill((depth >= last)[:, :, None], -1)
