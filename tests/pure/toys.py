"""Toy language models small enough to enumerate, and randomness that takes every way out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from vllm_adaptive_tree.proposers import OptTree, draft_tree
from vllm_adaptive_tree.trees import TokenTree, TreeBatch

T = TypeVar("T")
Path = tuple[int, ...]


class ToyLM:
    """A table with one law per history. History 0 is empty, and history h followed by token x is h * V + 1 + x."""

    def __init__(self, logits: Tensor):
        self.logits = logits  # [H, V]
        self.law = logits.softmax(-1)  # [H, V]
        self.vocabulary = logits.shape[1]

    @classmethod
    def random(
        cls, vocabulary: int, depth: int, *, seed: int, scale: float = 2.0, dtype: torch.dtype = torch.float64
    ) -> Self:
        """Laws for every history of up to `depth` tokens; `scale` makes them sharper."""
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
            result *= self.law[self.history(path[:depth]), token].item()
        return result

    def continuations(self, length: int, path: Path = ()) -> Tensor:
        """The law of the next `length` tokens: [V ** length], in lexicographic order."""
        if length == 0:
            return torch.ones(1, dtype=self.law.dtype)
        law = self.law[self.history(path)]
        rest = [self.continuations(length - 1, (*path, token)) for token in range(self.vocabulary)]
        return torch.cat([law[token] * rest[token] for token in range(self.vocabulary)])


class ToyDrafter:
    """The drafter's contract over one toy model per request; its state is the history read by every slot."""

    def __init__(self, models: Sequence[ToyLM]):
        self.logits = torch.stack([model.logits for model in models])  # [R, H, V]
        self.requests = torch.arange(len(models))[:, None]
        self.widths: list[int] = []

    def catch_up(self, accepted: Any, target_hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.logits[:, 0], torch.zeros_like(self.requests)

    def grow(self, tokens: Tensor, parent: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        self.widths.append(tokens.shape[1])
        history = state.gather(1, parent) * self.logits.shape[2] + 1 + tokens.clamp(min=0)  # [R, W]
        logits = self.logits[self.requests, history.masked_fill(tokens < 0, 0)].clone()
        logits[tokens < 0] = torch.tensor(1e3)  # what an unused slot reads must not matter
        return logits, torch.cat([state, history], 1)


def grow_trees(
    models: Sequence[ToyLM],
    *,
    nodes: int,
    max_depth: int,
    threshold: float = 0.0,
    temperature: Sequence[float] | float = 1.0,
    drafter: ToyDrafter | None = None,
    **options: Any,
) -> TreeBatch:
    drafter = drafter or ToyDrafter(models)
    logits, state = drafter.catch_up(None, None)
    sharpness = torch.as_tensor(temperature, dtype=logits.dtype).expand(len(models))
    proposer = OptTree(max_depth=max_depth, threshold=threshold)
    return draft_tree(proposer, drafter, logits, state, nodes=nodes, temperature=sharpness, **options)


def on_host(batch: TreeBatch) -> list[TokenTree]:
    """The trees of a batch; what stands behind a tree's last node must be empty."""
    trees = []
    for tokens, parent, depth, weight in zip(*(column.tolist() for column in batch), strict=True):
        size = sum(token >= 0 for token in tokens)
        assert tokens[size:] == parent[size:] == [-1] * (len(tokens) - size)
        assert weight[size:] == [-torch.inf] * (len(tokens) - size)
        tree = TokenTree(tuple(tokens[:size]), tuple(parent[:size]))
        tree.check_integrity()
        assert depth == tree.depths + [0] * (len(tokens) - size)
        trees.append(tree)
    return trees


def on_device(trees: Sequence[TokenTree], width: int | None = None) -> TreeBatch:
    """A batch of any trees; nothing that walks a tree reads the weights."""
    width = width or max(map(len, trees))

    def pad(rows: Iterable[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

    tokens = pad((tree.tokens for tree in trees), -1)
    parent = pad((tree.parents for tree in trees), -1)
    depth = pad((tree.depths for tree in trees), 0)
    return TreeBatch(tokens, parent, depth, torch.zeros(tokens.shape).masked_fill(tokens < 0, -torch.inf))


def paths(tree: TokenTree) -> list[Path]:
    """The tokens from the root to each node."""
    result: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        result.append((*(result[parent] if parent >= 0 else ()), token))
    return result


def random_tree(nodes: int, vocabulary: int, seed: int) -> TokenTree:
    """Every node hangs below an earlier one, or the root, with a token that no sibling has."""
    generator = torch.Generator().manual_seed(seed)
    free = [(parent, token) for parent in range(-1, nodes) for token in range(vocabulary)]
    tokens, parents = [], []
    for node in range(nodes):
        open_now = [slot for slot in free if slot[0] < node]
        parent, token = open_now[int(torch.randint(len(open_now), (), generator=generator))]
        free.remove((parent, token))
        tokens.append(token)
        parents.append(parent)
    return TokenTree(tuple(tokens), tuple(parents))


class ForkingRandom:
    """Follows a script of decisions and takes the first open way behind its end."""

    def __init__(self, script: list[list[tuple[float, int]]]):
        self._script = script  # per decision the ways still open, the present one in front
        self._next = 0

    @property
    def weight(self) -> float:
        result = 1.0
        for ways in self._script[: self._next]:
            result *= ways[0][0]
        return result

    def _fork(self, weights: Iterable[float]) -> int:
        if self._next == len(self._script):
            self._script.append([(weight, way) for way, weight in enumerate(weights) if weight > 0])
        self._next += 1
        return self._script[self._next - 1][0][1]

    def accept(self, probability: Tensor) -> Tensor:
        """[R] -> bool [R]"""
        return torch.tensor([self._fork([p, 1 - p]) == 0 for p in probability.tolist()])

    def choose(self, law: Tensor) -> Tensor:
        """[R, V] -> [R]"""
        return torch.tensor([self._fork(row) for row in law.tolist()])

    def draw_without_replacement(self, law: Tensor, k: int) -> Tensor:
        """[R, V] -> [R, k], in the order of the draws"""
        drawn = []
        for _ in range(k):
            drawn.append(self.choose(law / law.sum(-1, keepdim=True)))
            law = law.scatter(1, drawn[-1][:, None], 0.0)
        return torch.stack(drawn, 1)


def every_outcome(run: Callable[[ForkingRandom], T]) -> Iterator[tuple[float, T]]:
    """Run again and again, each time with other decisions, until none is left: (weight, result) of every run."""
    script: list[list[tuple[float, int]]] = []
    while True:
        random = ForkingRandom(script)
        result = run(random)
        yield random.weight, result
        while script and len(script[-1]) == 1:
            script.pop()
        if not script:
            return
        script[-1].pop(0)
