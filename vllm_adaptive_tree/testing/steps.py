"""Exact distribution of the tokens that a decoding step emits, by enumeration."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from vllm_adaptive_tree.acceptance import Accepted, Children, Kind, Rule, traversal, walk
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.testing.drafts import Drafts
from vllm_adaptive_tree.testing.models import ToyLM, conditionals, histories
from vllm_adaptive_tree.testing.outcomes import ForkingRandom, every_outcome
from vllm_adaptive_tree.trees import TreeBatch


class Emitted(NamedTuple):
    probs: Tensor  # [G, V ** length]: of the tokens of a step, continued by the target
    accepted: Tensor  # [G]: drafted tokens among them, on average


def emitted(drafts: Drafts, targets: Sequence[ToyLM], rule: type[Rule], kind: Kind, *, length: int) -> Emitted:
    """Tokens that `rule` emits from all trees of each group for targets[group % len(targets)], by enumeration."""
    vocabulary = targets[0].vocabulary
    groups, model = int(drafts.group.max()) + 1, drafts.group % len(targets)
    p = torch.stack([target.probs for target in targets])[model[:, None], histories(drafts.tree, vocabulary)]
    sequences = torch.cartesian_prod(*[torch.arange(vocabulary)] * length).view(-1, length)
    plain = torch.stack([conditionals(target, sequences) for target in targets])  # [M, S, length]
    probs = torch.zeros(groups, len(sequences), dtype=torch.float64)
    accepted = torch.zeros(groups, dtype=torch.float64)

    def run(rng: ForkingRandom, world: Tensor) -> tuple[Tensor, Tensor]:
        ends = Postponed(rng)
        own = rng if rule.draw is not None else ends
        tokens, nodes = verify(drafts.rows(world), p[world], rule, kind, own)
        return ends.probs_of(tokens, vocabulary), (nodes >= 0).sum(1)

    for weight, world, (given, count) in every_outcome(run, len(drafts.weight)):
        weight = weight * drafts.weight[world]
        chance = weight[:, None].expand(-1, len(sequences))
        for at in range(length):
            token = sequences[:, at]
            by_target = plain[model[world], :, at]
            here = given[:, at] if at < given.shape[1] else torch.zeros_like(given[:, 0])  # [R, V]
            chance = chance * torch.where(here.any(1, keepdim=True), here[:, token], by_target)
        probs.index_add_(0, drafts.group[world], chance)
        accepted.index_add_(0, drafts.group[world], weight * count)
    assert (probs.sum(1) - 1).abs().max() < 1e-5, "every outcome has its weight"
    return Emitted(probs, accepted)


def verify(drafts: Drafts, p: Tensor, rule: type[Rule], kind: Kind, rng: RandomSource) -> Accepted:
    """Verify one step as the engine does, for the target's distributions p [R, 1 + N, V] after root and nodes."""
    tree, row = drafts.tree, torch.arange(len(p))
    levels, most, draw = int(tree.depth.max()), drafts.most, rule.draw
    widest = max(1, min(most, int(tree.valid.sum(1).max())))  # in the whole batch

    def p_rows(node: Tensor, active: Tensor) -> Tensor:
        nothing = torch.eye(p.shape[2], dtype=p.dtype)[0]  # no outcome of a walk that has ended forks
        return torch.where(active[:, None], p[row, node + 1], nothing)

    def q_rows(node: Tensor) -> tuple[Tensor, Tensor]:
        return drafts.q[row, node + 1], drafts.drawn[row, node + 1]

    def by_rule(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        assert draw is not None
        q, drawn = q_rows(node)
        children = Children(tree.children(node, widest).masked_fill(~active[:, None], -1), drawn, most)
        token = draw(p_rows(node, active), q, children, rng.fold_in(node + 1))
        valid = token.dtype == torch.int64 and token.shape == node.shape and ((token >= 0) & (token < p.shape[2])).all()
        assert valid, (
            f"{rule.__name__}.draw must return a token from 0 to {p.shape[2] - 1} for each of {len(node)} rows, int64; "
            f"it returned {token.dtype}, shape {list(token.shape)}, values {token.unique().tolist()[:9]}"
        )
        return token, torch.ones_like(active)

    if draw is not None:
        return walk(tree, by_rule, levels=levels)
    chosen = drafts.chosen if drafts.chosen.any() else None
    path = traversal(tree, kind, p_rows, q_rows, rng, levels=levels, most=most, chosen=chosen).tokens
    return replayed(tree, path)


def replayed(tree: TreeBatch, path: Tensor) -> Accepted:
    """Walk along a known path [R, L + 1]."""
    level = iter(range(path.shape[1]))
    goes_on = pad(path, (0, 1), value=-1)[:, 1:] >= 0

    def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        at = next(level)
        return path[:, at], goes_on[:, at]

    return walk(tree, draw, levels=path.shape[1] - 1)


class Postponed:
    """A random source whose `sample` returns a number beyond the vocabulary, which stands for the distribution.

    Traversal draws one token, the last, but asks at every turn; forking there would not end.
    """

    def __init__(self, rng: ForkingRandom):
        self.rng, self.given = rng, list[Tensor]()

    def fold_in(self, key: Tensor) -> Self:
        return self

    def accept(self, probability: Tensor) -> Tensor:
        return self.rng.accept(probability)

    def sample(self, probs: Tensor) -> Tensor:
        self.given.append(probs)
        return torch.full((len(probs),), probs.shape[1] + len(self.given) - 1)

    def probs_of(self, tokens: Tensor, vocabulary: int) -> Tensor:
        """Distribution [R, T, V] of every token [R, T], one-hot if it is known; zeros if there is none."""
        probs = one_hot(tokens.clamp(0, vocabulary - 1), vocabulary).double()
        if self.given:
            row = torch.arange(len(tokens))[:, None]
            unknown = torch.stack(self.given)[(tokens - vocabulary).clamp(min=0), row]
            probs = torch.where(tokens[..., None] < vocabulary, probs, unknown)
        return probs * (tokens >= 0)[..., None]
