"""Check that a proposer's trees are what a rule and the engine take."""

import math
from collections import Counter

import torch

from vllm_adaptive_tree.proposers import Proposal, Proposer
from vllm_adaptive_tree.testing.drafts import keyed, propose
from vllm_adaptive_tree.testing.models import Path, ToyDrafter, ToyLM, one_thread

REQUESTS, DEPTH = 6, 4


@one_thread()
def assert_well_formed(proposer: Proposer, *, nodes: int = 8, vocabulary: int = 5) -> None:
    """Assert that a proposer grows trees within its bounds, parents first and nothing below a dead row, and that a
    request gets the same tree in a batch as alone.

    Raises:
        AssertionError: it does not; the message names the first tree that is wrong.
    """
    depth = min(proposer.max_depth, DEPTH)
    models = [ToyLM.random(vocabulary, depth, seed=seed, scale=0.5 + seed) for seed in range(REQUESTS)]
    for model in models[REQUESTS // 2 :]:
        model.logits[1 :: 2 + vocabulary // 2] = math.nan
    together = _trees(proposer, models, list(range(REQUESTS)), nodes, depth)
    for seed, model in enumerate(models):
        [alone] = _trees(proposer, [model], [seed], nodes, depth)
        assert alone == together[seed], f"a tree depends on the batch: {together[seed]} in a batch, {alone} alone"
    assert any(together), "no tree has a node"


def _trees(proposer: Proposer, models: list[ToyLM], seeds: list[int], nodes: int, depth: int) -> list[list[Path]]:
    limit, proposer.max_depth = proposer.max_depth, depth
    try:
        proposal = propose(proposer, ToyDrafter(models), nodes=nodes, rng=keyed(seeds))
    finally:
        proposer.max_depth = limit
    trees = paths_of(proposal)
    rows = zip(models, trees, proposal.tree.parent.tolist(), proposal.num_planned.tolist(), strict=True)
    for model, tree, parents, num_planned in rows:
        assert proposer.kind == "iid" or len(set(tree)) == len(tree), f"two nodes have the same path: {tree}"
        assert len(tree) <= nodes, f"{len(tree)} nodes in place of {nodes}: {tree}"
        assert all(len(path) <= depth for path in tree), f"deeper than {depth}: {tree}"
        for node, count in Counter(parents[: len(tree)]).items():
            path = tree[node] if node >= 0 else ()
            assert count <= proposer.max_children, f"{count} children in place of {proposer.max_children} of {path}"
            assert count <= num_planned[node + 1], f"{count} of {num_planned[node + 1]} planned children of {path}"
            assert not model.logits[model.history(path)].isnan().any(), f"children of {path}, whose row is dead"
    return trees


def paths_of(proposal: Proposal) -> list[list[Path]]:
    """Paths of every tree's nodes, in generation order.

    Raises:
        AssertionError: an entry of the proposal is invalid.
    """
    tree, read, num_planned, *_ = proposal
    assert read.shape == tree.tokens.shape, f"read has the shape {list(read.shape)}, tokens {list(tree.tokens.shape)}"
    assert num_planned.shape[1] == read.shape[1] + 1, "num_planned has an entry for the root and one for each node"
    return [_paths(*(column[r].tolist() for column in (*tree, read))) for r in range(len(read))]


def _paths(tokens: list[int], parents: list[int], depth: list[int], weight: list[float], read: list[int]) -> list[Path]:
    size = sum(token >= 0 for token in tokens)
    empty = (tokens[size:], parents[size:], depth[size:], weight[size:], read[size:])
    rest = len(tokens) - size
    assert empty == ([-1] * rest, [-1] * rest, [0] * rest, [-torch.inf] * rest, [-1] * rest), f"empty slots: {empty}"
    paths: list[Path] = []
    for node, (token, parent) in enumerate(zip(tokens[:size], parents[:size], strict=True)):
        assert -1 <= parent < node, f"node {node} has the parent {parent}: parents come first"
        assert parent < 0 or read[parent] >= 0, f"node {node} is a child of node {parent}, which was not read"
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert depth[node] == len(paths[node]), (
            f"node {node} has depth {depth[node]} and the path {paths[node]}: its parent is missing, or was not read"
        )
        assert weight[node] > -torch.inf, f"node {node} has the weight {weight[node]}"
    return paths
