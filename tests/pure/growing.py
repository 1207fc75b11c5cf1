"""Any proposer over toy models, through `draft_tree`; and what was read on the way."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from vllm_adaptive_tree.drafters import Frontier, Rows
from vllm_adaptive_tree.proposers import Proposal, Proposer, Request, draft_tree
from vllm_adaptive_tree.proposers.base import KEYS_PER_LEVEL
from vllm_adaptive_tree.rng import CounterRNG

from .toys import ToyDrafter, ToyLM

Path = tuple[int, ...]


def models_of(vocabulary: int, depth: int, count: int) -> list[ToyLM]:
    """Laws from flat to sharp, so that wide and deep trees both occur."""
    return [ToyLM.random(vocabulary, depth, seed=seed, scale=0.5 + seed % 6) for seed in range(count)]


def log_laws(model: ToyLM, temperature: float) -> Tensor:
    """[H, V]: the draft's log laws at a temperature."""
    return (model.logits / temperature).log_softmax(-1)


def keyed(seeds: Sequence[int] | int) -> CounterRNG:
    """Noise of as many requests."""
    seed = torch.tensor(seeds) if isinstance(seeds, Sequence) else torch.arange(seeds)
    return CounterRNG(seed, torch.zeros_like(seed), purpose=0)


def grow(
    proposer: Proposer,
    models: Sequence[ToyLM],
    *,
    nodes: int,
    temperature: Sequence[float] | float = 1.0,
    greedy: Sequence[bool] | bool = False,
    rng: Any = None,
    drafter: ToyDrafter | None = None,
    initial: Any = None,
    **options: Any,
) -> Proposal:
    drafter = drafter or ToyDrafter(models)
    rows, state = drafter.catch_up(None, None)
    request = Request(
        torch.as_tensor(temperature, dtype=rows.logits.dtype).expand(len(models)),
        torch.as_tensor(greedy).expand(len(models)),
        keyed(len(models)) if rng is None else rng,
        initial,
    )
    return draft_tree(proposer, drafter, rows, state, nodes=nodes, request=request, **options)


def as_the_engine(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
    """Cut the frontier behind its last used column; stop when none is left."""
    used = (frontier.tokens >= 0).any(0).nonzero()
    width = int(used.max()) + 1 if len(used) else 0
    return Frontier(frontier.tokens[:, :width], frontier.parent[:, :width]), width > 0


def grown(proposal: Proposal) -> list[list[Path]]:
    """The paths of every tree's nodes, in generation order; what does not belong into a proposal fails here."""
    tree, read, drawn = proposal
    assert read.shape == tree.tokens.shape
    assert drawn.shape[1] == read.shape[1] + 1
    return [_paths(*(column[r].tolist() for column in (*tree, read))) for r in range(len(read))]


def _paths(tokens: list[int], parents: list[int], depth: list[int], weight: list[float], read: list[int]) -> list[Path]:
    size = sum(token >= 0 for token in tokens)
    empty = (tokens[size:], parents[size:], depth[size:], weight[size:], read[size:])
    rest = len(tokens) - size
    assert empty == ([-1] * rest, [-1] * rest, [0] * rest, [-torch.inf] * rest, [-1] * rest)
    paths: list[Path] = []
    for node in range(size):
        assert -1 <= parents[node] < node, "parents come first"
        paths.append((*(paths[parents[node]] if parents[node] >= 0 else ()), tokens[node]))
        assert depth[node] == len(paths[node])
        assert weight[node] > -torch.inf
    return paths


class Recorder(ToyDrafter):
    """Remembers which history stood in every column of every level."""

    def __init__(self, models: Sequence[ToyLM]):
        super().__init__(models)
        self.histories = [torch.zeros(len(models), 1, dtype=torch.int64)]  # one [R, W] for each level, the root's first

    def grow(self, tokens: Tensor, parent: Tensor, state: Tensor) -> tuple[Rows, Tensor]:
        rows, state = super().grow(tokens, parent, state)
        history = state[:, state.shape[1] - tokens.shape[1] :]
        self.histories.append(history.masked_fill(tokens < 0, -1))
        return rows, state

    def draws(self, rng: CounterRNG, law: Tensor) -> list[dict[int, list[int]]]:
        """Every request's histories that were read -> their tokens in the order of the draws; `law` [R, H, V]."""
        keys = [
            level * KEYS_PER_LEVEL + torch.arange(histories.shape[1]) for level, histories in enumerate(self.histories)
        ]
        histories = torch.cat(self.histories, 1)
        return orders(rng, torch.cat(keys).expand(histories.shape), histories, law)


class PathNoise:
    """Keyed by a node's path, so that trees of different shapes share the draws of their common nodes."""

    def __init__(self, recorder: Recorder, seeds: Sequence[int] | int):
        self.recorder, self.rng = recorder, keyed(seeds)

    def fold_in(self, place: Tensor) -> CounterRNG:
        histories = self.recorder.histories[int(place[0, 0]) // KEYS_PER_LEVEL]
        return self.rng.fold_in(histories.gather(1, place % KEYS_PER_LEVEL))

    def draws(self, law: Tensor) -> list[dict[int, list[int]]]:
        """Every request's histories -> their tokens in the order of the draws; `law` [R, H, V]."""
        histories = torch.arange(law.shape[1]).expand(law.shape[:2])
        return orders(self.rng, histories, histories, law)

    def accept(self, probability: Tensor) -> Tensor:
        raise NotImplementedError

    def sample(self, law: Tensor) -> Tensor:
        raise NotImplementedError

    def sample_without_replacement(self, law: Tensor, k: int) -> Tensor:
        raise NotImplementedError


def orders(rng: CounterRNG, keys: Tensor, histories: Tensor, law: Tensor) -> list[dict[int, list[int]]]:
    """The tokens of the laws [R, H, V] at `histories` [R, W] in the order in which the rng at `keys` draws them."""
    rows = law.gather(1, histories.clamp(min=0)[:, :, None].expand(-1, -1, law.shape[2]))
    drawn = rng.fold_in(keys).sample_without_replacement(rows, law.shape[2])
    return [
        {history: [token for token in tokens if token >= 0] for history, tokens in zip(*row, strict=True)}
        for row in zip(histories.tolist(), drawn.tolist(), strict=True)
    ]


class Fixed(torch.nn.Module):
    """A gate that computes any function of its features, and remembers them."""

    def __init__(self, function: Any):
        super().__init__()
        self.function, self.seen = function, []

    def forward(self, features: Tensor) -> Tensor:
        self.seen.append(features)
        return self.function(features)

    @classmethod
    def always(cls, value: float) -> Self:
        return cls(lambda features: torch.full_like(features[..., 0], value))
