"""Compiled traversal accepts what `traversal` accepts, token for token."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import traversal
from vllm_adaptive_tree.acceptance.traversal_cpu import Rows, traversal_of_rows
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.trees import TreeBatch

REQUESTS, LEVELS, MOST = 64, 5, 3


def trees(vocabulary: int, peaked: float, generator: torch.Generator) -> tuple[TreeBatch, Tensor, Tensor]:
    """Trees of various sizes, with p and q after the root and each node [R, 1 + N, V]."""
    parents = [-1, -1, -1, 0, 0, 1, 3, 3, 3, 5, 6, 10]
    count = len(parents)
    p, q = (
        torch.softmax(peaked * torch.randn(REQUESTS, 1 + count, vocabulary, generator=generator), -1) for _ in (0, 1)
    )
    p = torch.softmax(p.log() + q.log(), -1)
    tokens = torch.full((REQUESTS, count), -1)
    for request in range(REQUESTS):
        for node in range(-1, count):
            children = [child for child, parent in enumerate(parents) if parent == node]
            if children:
                drawn = torch.multinomial(q[request, 1 + node], len(children), generator=generator)
                tokens[request, children] = drawn
    size = torch.arange(REQUESTS) % (count + 1)
    valid = torch.arange(count) < size[:, None]
    depth = torch.zeros(count, dtype=torch.int64)
    for node, parent in enumerate(parents):
        depth[node] = 1 if parent < 0 else depth[parent] + 1
    parent = torch.tensor(parents).expand(REQUESTS, -1)
    columns = (tokens, -1), (parent, -1), (depth.expand(REQUESTS, -1), 0), (torch.zeros(REQUESTS, count), -torch.inf)
    return TreeBatch(*(column.masked_fill(~valid, fill) for column, fill in columns)), p, q


@pytest.mark.parametrize(
    ("vocabulary", "peaked", "change"),
    [
        *[(3, 1.0, ""), (3, 6.0, ""), (40, 3.0, ""), (3000, 2.0, "")],
        *[(40, 3.0, "equal"), (40, 3.0, "apart"), (3, 1.0, "chosen"), (40, 3.0, "chosen")],
    ],
)
def test_tokens_are_those_of_traversal(vocabulary: int, peaked: float, change: str) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    row = torch.arange(REQUESTS)
    ends = set()
    for seed in range(4):
        tree, p, q = trees(vocabulary, peaked, generator)
        if change == "equal":
            p = q.clone()
        if change == "apart":  # the target has nothing where the draft has most
            p = torch.where(q >= q.amax(-1, keepdim=True), 0.0, p)
            p /= p.sum(-1, keepdim=True)
        rng = CounterRNG(row + 1000 * seed, 7 * row, 1)
        chosen = (torch.arange(tree.tokens.shape[1]) % 3 == 0).expand_as(
            tree.tokens
        ) & tree.valid  # first and later ones
        chosen = chosen if change == "chosen" else torch.zeros_like(chosen)

        def p_rows(node: Tensor, active: Tensor, p: Tensor = p) -> Tensor:
            return p[row, 1 + node]

        def q_rows(node: Tensor, q: Tensor = q) -> tuple[Tensor, Tensor]:
            return q[row, 1 + node], torch.full_like(node, MOST)

        wanted = traversal(tree, "without_replacement", p_rows, q_rows, rng, levels=LEVELS, most=MOST, chosen=chosen)
        rows = []
        for request in range(REQUESTS):
            size = int(tree.valid[request].sum())
            of_nodes = (
                p[request, : 1 + size],
                q[request, : 1 + size],
                np.arange(1 + size),
                chosen[request, :size].numpy(),
            )
            rows.append(Rows(request, *of_nodes))
        found = traversal_of_rows(tree, rows, rng, levels=LEVELS)
        assert found.nodes.equal(wanted.nodes)
        assert found.tokens.equal(wanted.tokens)
        ends |= set((found.nodes >= 0).sum(1).tolist())
    assert ends >= ({0, 1} if change == "apart" else {0, 1, 2, 3}), "it rejects, and accepts whole paths"


def test_others_are_left_alone() -> None:
    tree, p, q = trees(40, 3.0, torch.Generator().manual_seed(0))
    rng = CounterRNG(torch.arange(REQUESTS), torch.arange(REQUESTS), 1)
    at = [REQUESTS - 1, 5]
    sizes = tree.valid.sum(1).tolist()
    rows = [
        Rows(r, p[r, : 1 + size], q[r, : 1 + size], np.arange(1 + size), np.zeros(size, bool))
        for r, size in enumerate(sizes)
    ]
    every = traversal_of_rows(tree, rows, rng, levels=LEVELS)
    some = traversal_of_rows(tree, [rows[r] for r in at], rng, levels=LEVELS)
    assert some.tokens[at].equal(every.tokens[at])
