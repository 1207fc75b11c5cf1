"""Language models small enough to enumerate, and a drafter over them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.trees import TreeBatch

Path = tuple[int, ...]
Models = tuple[list["ToyLM"], list["ToyLM"]]  # drafts and their targets


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread: the tensors are so small that several would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
        """Distribution of the next `length` tokens: [V ** length], in lexicographic order."""
        if length == 0:
            return torch.ones(1, dtype=self.probs.dtype)
        probs = self.probs[self.history(path)]
        rest = [self.continuations(length - 1, (*path, token)) for token in range(self.vocabulary)]
        return torch.cat([probs[token] * rest[token] for token in range(self.vocabulary)])


class ToyDrafter:
    """Drafter over toy models; its state is the history read by every slot."""

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
        logits[tokens < 0] = certain  # the row of an unused slot must not matter
        return Rows(logits), torch.cat([state, history], 1)


def conditionals(model: ToyLM, sequences: Tensor) -> Tensor:
    """Probability of every token of the sequences [S, L] after those before it: [S, L]."""
    history, result = torch.zeros_like(sequences[:, 0]), []
    for token in sequences.unbind(1):
        result.append(model.probs.double()[history, token])
        history = history * model.vocabulary + 1 + token
    return torch.stack(result, 1)


def histories(tree: TreeBatch, vocabulary: int) -> Tensor:
    """Number of the history that ends at the root (first) and at each node: [R, 1 + N]."""
    result = torch.zeros_like(pad(tree.tokens, (1, 0)))
    for node in range(tree.tokens.shape[1]):
        above = result.gather(1, tree.parent[:, node, None] + 1)[:, 0]
        result[:, node + 1] = torch.where(tree.valid[:, node], above * vocabulary + 1 + tree.tokens[:, node], 0)
    return result


def random_pairs(vocabulary: int, depth: int, temperature: float) -> Models:
    """Two pairs that differ a little, one in which each lacks tokens of the other, a nearly certain one, and one whose
    draft at `temperature` equals its target."""
    draft = [ToyLM.random(vocabulary, depth, seed=seed, scale=1.5).logits for seed in range(5)]
    target = [logits + ToyLM.random(vocabulary, depth, seed=9 - r, scale=1.5).logits for r, logits in enumerate(draft)]
    draft[2][::2, 0], target[2][::3, 1] = -torch.inf, -torch.inf
    draft[3], target[3] = 20 * draft[3], 8 * target[3]
    target[4] = draft[4] / temperature
    return [ToyLM(logits) for logits in draft], [ToyLM(logits) for logits in target]
