"""Draft trees of tests: between the host and tensors, as paths and histories, at random."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vllm_adaptive_tree.testing.models import Path
from vllm_adaptive_tree.trees import TokenTree, TreeBatch


def on_host(batch: TreeBatch) -> list[TokenTree]:
    """Trees of a batch; slots after a tree's last node must be empty."""
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
    """A batch of any trees; their weights are not read by a walk."""
    width = width or max(map(len, trees))

    def pad(rows: Iterable[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

    tokens = pad((tree.tokens for tree in trees), -1)
    parent = pad((tree.parents for tree in trees), -1)
    depth = pad((tree.depths for tree in trees), 0)
    return TreeBatch(tokens, parent, depth, torch.zeros(tokens.shape).masked_fill(tokens < 0, -torch.inf))


def paths(tree: TokenTree) -> list[Path]:
    """Tokens from the root to each node."""
    result: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        result.append((*(result[parent] if parent >= 0 else ()), token))
    return result


def random_tree(nodes: int, vocabulary: int, seed: int) -> TokenTree:
    """Random tree: every node hangs below an earlier one, or the root, with a token that no sibling has."""
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
