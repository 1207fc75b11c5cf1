"""Toy language models small enough to enumerate, and a drafter over them."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tests.oracles.trees import Path
from vllm_adaptive_tree.drafters import Rows


class ToyLM:
    """One distribution per history. History 0 is empty, and history h followed by token x is h * V + 1 + x."""

    def __init__(self, logits: Tensor):
        self.logits = logits  # [H, V]
        self.probs = logits.softmax(-1)  # [H, V]
        self.vocabulary = logits.shape[1]

    @classmethod
    def random(
        cls, vocabulary: int, depth: int, *, seed: int, scale: float = 2.0, dtype: torch.dtype = torch.float64
    ) -> Self:
        """Distributions for every history of up to `depth` tokens; `scale` makes them sharper."""
        histories = sum(vocabulary**length for length in range(depth + 1))
        generator = torch.Generator().manual_seed(seed)
        return cls(scale * torch.randn(histories, vocabulary, generator=generator, dtype=dtype))

    def history(self, path: Iterable[int]) -> int:
        number = 0
        for token in path:
            number = number * self.vocabulary + 1 + token
        return number

    def probability(self, path: Sequence[int]) -> float:
        result = 1.0
        for depth, token in enumerate(path):
            result *= self.probs[self.history(path[:depth]), token].item()
        return result

    def continuations(self, length: int, path: Path = ()) -> Tensor:
        """The distribution of the next `length` tokens: [V ** length], in lexicographic order."""
        if length == 0:
            return torch.ones(1, dtype=self.probs.dtype)
        probs = self.probs[self.history(path)]
        rest = [self.continuations(length - 1, (*path, token)) for token in range(self.vocabulary)]
        return torch.cat([probs[token] * rest[token] for token in range(self.vocabulary)])


class ToyDrafter:
    """The drafter interface over toy models; its state is the history read by every slot."""

    def __init__(self, models: Sequence[ToyLM], which: Tensor | None = None):
        """`which` [R]: the model of each request, by default one model per request."""
        self.logits = torch.stack([model.logits for model in models])  # [M, H, V]
        self.which = torch.arange(len(models)) if which is None else which
        self.widths: list[int] = []

    def catch_up(self, accepted: Any, target_hidden: Tensor | None) -> tuple[Rows, Tensor]:
        return Rows(self.logits[self.which, :1]), torch.zeros_like(self.which)[:, None]

    def grow(self, tokens: Tensor, parent: Tensor, state: Tensor) -> tuple[Rows, Tensor]:
        self.widths.append(tokens.shape[1])
        history = state.gather(1, parent) * self.logits.shape[2] + 1 + tokens.clamp(min=0)  # [R, W]
        logits = self.logits[self.which[:, None], history.masked_fill(tokens < 0, 0)]
        certain = torch.full_like(logits[0, 0], -1e4).index_fill(0, torch.tensor(0), 1e4)
        logits[tokens < 0] = certain  # what an unused slot reads must not matter
        return Rows(logits), torch.cat([state, history], 1)


def models_of(vocabulary: int, depth: int, count: int) -> list[ToyLM]:
    """Distributions from flat to sharp, so that wide and deep trees both occur."""
    return [ToyLM.random(vocabulary, depth, seed=seed, scale=0.5 + seed % 6) for seed in range(count)]


def log_probs_of(model: ToyLM, temperature: float) -> Tensor:
    """[H, V]: the draft's log probabilities at a temperature."""
    return (model.logits / temperature).log_softmax(-1)


def conditionals(model: ToyLM, sequences: Tensor) -> Tensor:
    """The probability of every token of the sequences [S, L] after those before it: [S, L]."""
    history, result = torch.zeros_like(sequences[:, 0]), []
    for token in sequences.unbind(1):
        result.append(model.probs.double()[history, token])
        history = history * model.vocabulary + 1 + token
    return torch.stack(result, 1)
