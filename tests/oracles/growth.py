"""Growth of any proposer's trees over toy models, through `draft_tree`, and a record of its reads."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.proposers import Proposal, Proposer
from vllm_adaptive_tree.proposers.base import KEYS_PER_LEVEL
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.testing.drafts import keyed, propose
from vllm_adaptive_tree.testing.models import ToyDrafter, ToyLM
from vllm_adaptive_tree.trees import TreeBatch


def grow(
    proposer: Proposer, models: Sequence[ToyLM], *, nodes: int, drafter: ToyDrafter | None = None, **options: Any
) -> Proposal:
    """One tree per model, with options as for `propose`."""
    return propose(proposer, drafter or ToyDrafter(models), nodes=nodes, **options)


def grow_trees(
    models: Sequence[ToyLM], *, nodes: int, max_depth: int, threshold: float = 0.0, **options: Any
) -> TreeBatch:
    """OPT-Tree's trees, one per model, with options as for `propose`."""
    return grow(OptTree(max_depth=max_depth, threshold=threshold), models, nodes=nodes, **options).tree


def as_the_engine(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
    """Cut the frontier after its last used column; stop when none is left."""
    used = (frontier.tokens >= 0).any(0).nonzero()
    width = int(used.max()) + 1 if len(used) else 0
    return Frontier(frontier.tokens[:, :width], frontier.parent[:, :width]), width > 0


class Recorder(ToyDrafter):
    """Drafter that records the history in every column of every level."""

    def __init__(self, models: Sequence[ToyLM]):
        super().__init__(models)
        self.histories = [torch.zeros(len(models), 1, dtype=torch.int64)]  # one [R, W] for each level, the root's first

    def grow(self, tokens: Tensor, parent: Tensor, state: Tensor) -> tuple[Rows, Tensor]:
        rows, state = super().grow(tokens, parent, state)
        history = state[:, state.shape[1] - tokens.shape[1] :]
        self.histories.append(history.masked_fill(tokens < 0, -1))
        return rows, state

    def draws(self, rng: CounterRNG, probs: Tensor) -> list[dict[int, list[int]]]:
        """Every request's histories that were read -> their tokens in the order of the draws; `probs` [R, H, V]."""
        keys = [
            level * KEYS_PER_LEVEL + torch.arange(histories.shape[1]) for level, histories in enumerate(self.histories)
        ]
        histories = torch.cat(self.histories, 1)
        return orders(rng, torch.cat(keys).expand(histories.shape), histories, probs)


class PathNoise:
    """Random source keyed by a node's path, so that trees of different shapes share the draws of their common nodes."""

    def __init__(self, recorder: Recorder, seeds: Sequence[int] | int):
        self.recorder, self.rng = recorder, keyed(seeds)

    def fold_in(self, place: Tensor) -> CounterRNG:
        histories = self.recorder.histories[int(place[0, 0]) // KEYS_PER_LEVEL]
        return self.rng.fold_in(histories.gather(1, place % KEYS_PER_LEVEL))

    def draws(self, probs: Tensor) -> list[dict[int, list[int]]]:
        """Every request's histories -> their tokens in the order of the draws; `probs` [R, H, V]."""
        histories = torch.arange(probs.shape[1]).expand(probs.shape[:2])
        return orders(self.rng, histories, histories, probs)

    def accept(self, probability: Tensor) -> Tensor:
        raise NotImplementedError

    def sample(self, probs: Tensor) -> Tensor:
        raise NotImplementedError

    def sample_without_replacement(self, probs: Tensor, k: int) -> Tensor:
        raise NotImplementedError


def orders(rng: CounterRNG, keys: Tensor, histories: Tensor, probs: Tensor) -> list[dict[int, list[int]]]:
    """The tokens of `probs` [R, H, V] at `histories` [R, W] in the order in which the rng at `keys` draws them."""
    rows = probs.gather(1, histories.clamp(min=0)[:, :, None].expand(-1, -1, probs.shape[2]))
    drawn = rng.fold_in(keys).sample_without_replacement(rows, probs.shape[2])
    return [
        {history: [token for token in tokens if token >= 0] for history, tokens in zip(*row, strict=True)}
        for row in zip(histories.tolist(), drawn.tolist(), strict=True)
    ]


def models_of(vocabulary: int, depth: int, count: int) -> list[ToyLM]:
    """Distributions from flat to sharp, so that wide and deep trees both occur."""
    return [ToyLM.random(vocabulary, depth, seed=seed, scale=0.5 + seed % 6) for seed in range(count)]


def log_probs_of(model: ToyLM, temperature: float) -> Tensor:
    """Draft's log probabilities [H, V] at a temperature."""
    return (model.logits / temperature).log_softmax(-1)


class Fixed(torch.nn.Module):
    """A gate that computes any function of its features, and records them."""

    def __init__(self, function: Any):
        super().__init__()
        self.function, self.seen, self.features = function, [], "paper"

    def forward(self, features: Tensor) -> Tensor:
        self.seen.append(features)
        return self.function(features)

    @classmethod
    def always(cls, value: float) -> Self:
        return cls(lambda features: torch.full_like(features[..., 0], value))
