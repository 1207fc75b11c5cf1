"""OPT-Tree against brute force, and the theorems of its paper (arXiv 2406.17276) as invariants."""

import math
from itertools import product

import pytest
import torch

from tests.oracles.growth import grow_trees
from tests.oracles.trees import on_host, paths
from vllm_adaptive_tree.drafters import Frontier
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.testing.drafts import propose
from vllm_adaptive_tree.testing.models import Path, ToyDrafter, ToyLM
from vllm_adaptive_tree.trees import TreeBatch

BRUTE_FORCE = [*product([2, 3], [1, 2, 3, 4], [1, 2, 3]), (2, 5, 5), (3, 4, 4)]


def models_of(vocabulary: int, depth: int, count: int = 6) -> list[ToyLM]:
    """Laws from flat to sharp, so that wide and deep trees both occur."""
    return [ToyLM.random(vocabulary, depth, seed=seed, scale=0.5 + seed) for seed in range(count)]


def expected_acceptance(model: ToyLM, tree_paths: list[Path]) -> float:
    return math.fsum(map(model.probability, tree_paths))


def acceptances(batch: TreeBatch) -> list[float]:
    return batch.log_weight.exp().sum(1).tolist()


def all_subtrees(vocabulary: int, depth: int, nodes: int) -> set[frozenset[Path]]:
    """Every set of `nodes` paths that holds the parents of its members."""
    trees = {frozenset[Path]()}
    for _ in range(nodes):
        trees = {
            tree | {(*path, token)}
            for tree in trees
            for path in {(), *tree}
            for token in range(vocabulary)
            if len(path) < depth and (*path, token) not in tree
        }
    return trees


def k_config(model: ToyLM, widths: list[int]) -> list[Path]:
    """The tree in which every node of a level has the same number of children, its most probable tokens."""
    level: list[Path] = [()]
    tree: list[Path] = []
    for width in widths:
        best = {path: model.probs[model.history(path)].topk(width).indices.tolist() for path in level}
        level = [(*path, token) for path in level for token in best[path]]
        tree += level
    return tree


@pytest.mark.parametrize(("vocabulary", "nodes", "depth"), BRUTE_FORCE)
def test_no_subtree_is_better(vocabulary, nodes, depth):
    models = models_of(vocabulary, depth)
    nodes = min(nodes, vocabulary) if depth == 1 else nodes
    batch = grow_trees(models, nodes=nodes, max_depth=depth)
    subtrees = all_subtrees(vocabulary, depth, nodes)
    for model, tree, acceptance in zip(models, on_host(batch), acceptances(batch), strict=True):
        best = max(subtrees, key=lambda subtree: expected_acceptance(model, list(subtree)))
        assert set(paths(tree)) == best
        assert acceptance == pytest.approx(expected_acceptance(model, list(best)), abs=1e-12)


def test_weights_are_path_probabilities_in_falling_order():
    models = models_of(vocabulary=4, depth=4)
    batch = grow_trees(models, nodes=12, max_depth=4)
    for model, tree, weights in zip(models, on_host(batch), batch.log_weight.tolist(), strict=True):
        assert len(tree) == 12
        assert weights == pytest.approx([math.log(model.probability(path)) for path in paths(tree)], abs=1e-12)
        assert weights == sorted(weights, reverse=True)


def test_a_layer_holds_at_most_one():
    batch = grow_trees(models_of(vocabulary=3, depth=4), nodes=30, max_depth=4)
    for level in range(1, 5):
        assert (batch.log_weight.exp() * (batch.depth == level)).sum(1).max() <= 1 + 1e-12


def test_acceptance_is_monotone_and_concave_in_depth():
    models = models_of(vocabulary=3, depth=6)
    by_depth = [acceptances(grow_trees(models, nodes=7, max_depth=depth)) for depth in range(1, 7)]
    gain = torch.tensor([[0.0] * len(models), *by_depth], dtype=torch.float64).diff(dim=0)
    assert gain.min() >= -1e-12
    assert gain.diff(dim=0).max() <= 1e-12
    assert gain.max() <= 1 + 1e-12


@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.5, 0.9])
def test_drafting_goes_on_while_a_level_pays(threshold):
    """The levels worth their price maximise E(A) - threshold * depth; only the level that proved it is drafted too."""
    models, deepest = models_of(vocabulary=3, depth=5), 5
    full = [grow_trees(models, nodes=6, max_depth=depth) for depth in range(1, deepest + 1)]
    value = torch.tensor([[0.0] * len(models), *map(acceptances, full)], dtype=torch.float64)
    value = value - threshold * torch.arange(deepest + 1)[:, None]  # [D + 1, R]
    stop = (value.argmax(0) + 1).clamp(max=deepest).tolist()
    batch = grow_trees(models, nodes=6, max_depth=deepest, threshold=threshold)
    assert on_host(batch) == [on_host(full[depth - 1])[r] for r, depth in enumerate(stop)]
    for r, depth in enumerate(stop):
        drafter = ToyDrafter(models[r : r + 1])
        any_left = {"agree": lambda frontier, growing: (frontier, bool(growing.any()))}
        grow_trees(models[r : r + 1], nodes=6, max_depth=deepest, threshold=threshold, drafter=drafter, **any_left)
        assert len(drafter.widths) == depth - 1


@pytest.mark.parametrize("widths", [[1] * 4, [2, 2, 2], [3, 2, 1], [1, 2, 3], [3, 3]])
def test_fixed_shapes_are_never_better(widths):
    models = models_of(vocabulary=4, depth=4)
    fixed = [k_config(model, widths) for model in models]
    ours = acceptances(grow_trees(models, nodes=len(fixed[0]), max_depth=len(widths)))
    theirs = [expected_acceptance(model, tree) for model, tree in zip(models, fixed, strict=True)]
    assert all(a >= b - 1e-12 for a, b in zip(ours, theirs, strict=True))
    assert any(a > b + 1e-3 for a, b in zip(ours, theirs, strict=True))


def test_every_prefix_is_the_best_smaller_tree():
    models = models_of(vocabulary=3, depth=6)
    batch = grow_trees(models, nodes=6, max_depth=6)
    for nodes in range(1, 7):
        cut = batch.cut(torch.full((len(models),), nodes))
        assert on_host(cut) == on_host(grow_trees(models, nodes=nodes, max_depth=6))


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_requests_do_not_see_each_other(threshold):
    models = models_of(vocabulary=3, depth=5)
    temperature = [1.0, 0.5, 1.0, 2.0, 0.7, 1.0]
    options = {"nodes": 6, "max_depth": 5, "threshold": threshold}
    together = on_host(grow_trees(models, temperature=temperature, **options))
    alone = [on_host(grow_trees([m], temperature=t, **options))[0] for m, t in zip(models, temperature, strict=True)]
    assert together == alone
    assert len({max(tree.depths) for tree in together}) > 1, "they stop at different depths"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nodes", range(1, 7))
def test_certain_tokens_grow_a_chain(nodes, dtype):
    """p == 1.0 makes a child as heavy as its parent; it must not take the parent's place."""
    logits = ToyLM.random(3, 6, seed=0, dtype=dtype).logits
    logits.scatter_(1, logits.argmax(1, keepdim=True), 1e4)
    batch = grow_trees([ToyLM(logits)], nodes=nodes, max_depth=6)
    (tree,) = on_host(batch)
    assert tree.is_chain
    assert tree.depths == list(range(1, nodes + 1))
    assert acceptances(batch) == [nodes]


@pytest.mark.parametrize("nodes", range(1, 7))
def test_ties_go_to_the_shallower_node(nodes):
    """A fair coin, then certain tokens: two nodes in each layer, all of one weight."""
    logits = torch.zeros(1 + 3 + 9, 3)
    logits[:, 2] = -1e4
    logits[1:, 1] = -1e4
    (tree,) = on_host(grow_trees([ToyLM(logits)], nodes=nodes, max_depth=3))
    assert tree.depths == [1, 1, 2, 2, 3, 3][:nodes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_read_in_float32(dtype):
    half = [ToyLM.random(3, 4, seed=seed, dtype=dtype) for seed in range(4)]
    batch = grow_trees(half, nodes=6, max_depth=4, temperature=0.5)
    assert batch.log_weight.dtype == torch.float32
    full = [ToyLM(model.logits.float()) for model in half]
    assert on_host(batch) == on_host(grow_trees(full, nodes=6, max_depth=4, temperature=0.5))


@pytest.mark.parametrize(("depth", "size"), [(1, 2), (2, 6), (3, 9)])
def test_a_vocabulary_smaller_than_the_budget(depth, size):
    for tree in on_host(grow_trees(models_of(vocabulary=2, depth=3), nodes=9, max_depth=depth)):
        assert len(tree) == size


def test_masked_tokens_are_never_drafted():
    masked = [model.logits.clone() for model in models_of(vocabulary=4, depth=3)]
    forbidden = torch.rand(masked[0].shape, generator=torch.Generator().manual_seed(0)) < 0.6
    forbidden[:, 0] = False
    models = [ToyLM(logits.masked_fill(forbidden, -torch.inf)) for logits in masked]
    trees = on_host(grow_trees(models, nodes=40, max_depth=3))
    possible = [path for depth in (1, 2, 3) for path in product(range(4), repeat=depth) if models[0].probability(path)]
    assert 3 <= len(possible) < 40
    for tree in trees:
        assert set(paths(tree)) == set(possible)


def test_a_lower_draft_temperature_sharpens_the_tree():
    models = models_of(vocabulary=3, depth=5, count=2)
    for temperature in (0.3, 2.0):
        scaled = [ToyLM(model.logits / temperature) for model in models]
        batch = grow_trees(models, nodes=5, max_depth=5, temperature=temperature)
        assert on_host(batch) == on_host(grow_trees(scaled, nodes=5, max_depth=5))
    deep, flat = (on_host(grow_trees(models, nodes=5, max_depth=5, temperature=t)) for t in (0.1, 10.0))
    assert all(max(a.depths) > max(b.depths) for a, b in zip(deep, flat, strict=True))


def cut_to_used_width(frontier: Frontier, growing: torch.Tensor) -> tuple[Frontier, bool]:
    used = frontier.tokens >= 0
    width = int(used.sum(1).max())
    assert not used[:, width:].any(), "nodes are packed to the left"
    return Frontier(frontier.tokens[:, :width], frontier.parent[:, :width]), bool(growing.any())


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_cutting_the_unused_width_changes_nothing(threshold):
    models = models_of(vocabulary=3, depth=5)
    drafter = ToyDrafter(models)
    options = {"nodes": 8, "max_depth": 5, "threshold": threshold}
    cut = grow_trees(models, drafter=drafter, agree=cut_to_used_width, **options)
    assert on_host(cut) == on_host(grow_trees(models, **options))
    assert min(drafter.widths) < 8


def test_nodes_whose_children_cannot_enter_are_not_read():
    """Equal nodes that fill the tree have lighter children; of a sharp tree only the best node is read."""
    flat, sharp = torch.zeros(21, 4), torch.zeros(21, 4).index_fill(1, torch.tensor(0), 3.0)
    for logits, widths in ((flat, []), (sharp, [1])):
        drafter = ToyDrafter([ToyLM(logits)])
        grow_trees([ToyLM(logits)], nodes=3, max_depth=2, drafter=drafter, agree=cut_to_used_width)
        assert drafter.widths == widths


@pytest.mark.parametrize("probability", [0.02, 0.1, 0.4])
def test_above_a_floor_the_tree_is_the_same(probability):
    """And nothing below it is read."""
    models = models_of(vocabulary=3, depth=5)
    whole = grow_trees(models, nodes=16, max_depth=5)
    proposer = OptTree(max_depth=5, threshold=0.0)
    proposer.floor = math.log(probability)
    found = propose(proposer, ToyDrafter(models), nodes=16)
    above = [tree.log_weight > proposer.floor for tree in (whole, found.tree)]
    for r in range(len(models)):
        trees = [
            on_host(tree)[r].prefix(int(most[r].sum())) for tree, most in zip((whole, found.tree), above, strict=True)
        ]
        assert trees[0] == trees[1]
    assert not (found.read >= 0)[~above[1]].any()


def test_agree_ends_the_growth():
    models = models_of(vocabulary=3, depth=4)
    levels = iter([True, False])
    stopped = grow_trees(models, nodes=6, max_depth=4, agree=lambda frontier, growing: (frontier, next(levels)))
    assert on_host(stopped) == on_host(grow_trees(models, nodes=6, max_depth=2))
