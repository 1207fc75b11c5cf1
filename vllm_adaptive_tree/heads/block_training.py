"""Lessons of a target for a one-forward head: its distributions at the K places after many roots of a text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_adaptive_tree.heads.dspark import BlockHead
from vllm_adaptive_tree.heads.observations import Law, Observation, Observer

DEPTH_WEIGHT = 0.8  # of the loss at a depth, relative to the depth before
MARGINAL = 0.5  # weight of the loss without the bias: the backbone alone serves as a DFlash head
SPACING = 8  # tokens between the roots of a window
MOST_COUNTED = 16_384  # tokens of a vocabulary whose pairs are counted, in 1 GiB; the bias of a larger one begins at 0
SMOOTHING = 20.0  # weight of a token's prior, in pairs


class BlockLesson(NamedTuple):
    """P roots in each of B windows; depth j is the j-th token after a root."""

    law: Law  # [B, P, K]: of the token at each depth
    before: Tensor  # [B, P, K]: the token before it
    auxiliary: Tensor  # [B, T, A * H]
    embedded: Tensor  # [B, P, 1 + K, H]: of the roots and the masks
    roots: Tensor  # [P]: positions


class BlockTeacher:
    """Frozen Llama-like target of transformers, which gives lessons for a head.

    Args:
        layers: the target's layers whose inputs the head reads.
        depth, mask: as in `Block`.
        draft_ids: [D] int64, the ids of the head's own vocabulary; None: it is the target's.
    """

    def __init__(self, target: Any, layers: Sequence[int], depth: int, mask: int, draft_ids: Tensor | None = None):
        self.observe = Observer(target, layers, draft_ids)
        self.target, self.depth, self.mask, self.draft_ids = self.observe.target, depth, mask, draft_ids

    def __call__(self, tokens: Tensor, seen: Observation | None = None, roots: Tensor | None = None) -> BlockLesson:
        """Lesson of `tokens` [B, T], by default at every eighth token with K more after it.

        Args:
            seen: the target's observation of them, if there is one.
        """
        law, auxiliary = self.observe(tokens) if seen is None else seen
        if roots is None:
            roots = torch.arange(1, tokens.shape[1] - self.depth, SPACING)
        predecessors = roots[:, None] + torch.arange(self.depth)  # [P, K]: the token before each depth
        masks = torch.full((*tokens[:, roots].shape, self.depth), self.mask)
        embedded = self.target.model.embed_tokens(torch.cat([tokens[:, roots, None], masks], -1))
        auxiliary = auxiliary.to(embedded.dtype)
        return BlockLesson(law.at(predecessors), tokens[:, predecessors], auxiliary, embedded, roots)

    def initialise(self, head: BlockHead, tokens: Tensor) -> None:
        """Initialise as the target's last layers over its last auxiliary state, with a bias for the pairs in `tokens`
        if the vocabulary has at most `MOST_COUNTED`."""
        width, mine = head.norm.weight.shape[0], list(head.layers)
        with torch.no_grad():
            for layer, theirs in zip(mine, self.target.model.layers[-len(mine) :], strict=True):
                layer.load_state_dict(theirs.state_dict(), strict=False)  # it has no q_norm and k_norm
            head.norm.weight.copy_(self.target.model.norm.weight)
            head.fc.weight.zero_()
            head.fc.weight[:, -width:].copy_(torch.eye(width))
            if head.lm_head is not None:
                head.lm_head.weight.copy_(self.target.lm_head.weight[self.draft_ids])
            vocabulary = self.target.config.vocab_size
            if vocabulary > MOST_COUNTED:
                head.markov_head.markov_w2.weight.zero_()
                return
            left, right = low_rank(pointwise(tokens, vocabulary), head.block.rank)
            head.markov_head.markov_w1.weight.copy_(left)
            head.markov_head.markov_w2.weight.copy_(right if self.draft_ids is None else right[self.draft_ids])

    def loss(self, head: BlockHead, lesson: BlockLesson, steps: int) -> tuple[Tensor, Tensor]:
        """Cross-entropy with the target's distributions, with the bias and without; and agreement by depth [K].

        Agreement is of the most probable token, with the bias, after the text's own tokens.
        """
        normed = head(lesson.auxiliary, lesson.embedded, lesson.roots)
        output = self.target.lm_head.weight if head.lm_head is None else head.lm_head.weight
        marginal = F.linear(normed, output).float()
        total, agreement = torch.zeros(()), []
        for depth in range(steps):
            law, alone = Law(*(part[:, :, depth] for part in lesson.law)), marginal[:, :, depth]
            biased = alone + head.markov_head(lesson.before[:, :, depth]).float()
            loss = law.cross_entropy(biased) + MARGINAL * law.cross_entropy(alone)
            total = total + DEPTH_WEIGHT**depth * loss / (1 + MARGINAL)
            best = biased.argmax(-1)
            if self.draft_ids is not None:
                best = self.draft_ids[best]
            agreement.append((best == law.best).float().mean())
        return total / sum(DEPTH_WEIGHT**depth for depth in range(steps)), torch.stack(agreement)


def pointwise(tokens: Tensor, vocabulary: int) -> Tensor:
    """[V, V]: log ratio of a token's frequency after another token to its frequency anywhere, smoothed."""
    pairs = torch.bincount(tokens[:-1] * vocabulary + tokens[1:], minlength=vocabulary**2).view(vocabulary, -1).float()
    share = (pairs.sum(0) + 1) / (pairs.sum() + vocabulary)
    following = (pairs + SMOOTHING * share) / (pairs.sum(1, keepdim=True) + SMOOTHING)
    return (following / share).log()


def low_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors [V, rank] of the nearest matrix of this rank: the first times the second's transpose."""
    torch.manual_seed(0)
    left, values, right = torch.svd_lowrank(matrix, rank + 16, niter=4)
    root = values[:rank].sqrt()
    return left[:, :rank] * root, right[:, :rank] * root
