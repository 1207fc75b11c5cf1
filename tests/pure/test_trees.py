import numpy as np
import pytest
import torch

from tests.oracles.trees import on_device, on_host, paths, random_tree
from vllm_adaptive_tree.engine.v1.branches import Branches
from vllm_adaptive_tree.trees import TokenTree
from vllm_adaptive_tree.trees.masks import ancestor_mask

#      root - 5 - 7 - 5
#           |   `- 8 - 9
#           `- 6 - 7
BRANCHED = TokenTree((5, 6, 7, 8, 7, 9, 5), (-1, -1, 0, 0, 1, 3, 2))


def test_chain():
    chain = TokenTree.chain([4, 4, 2])
    assert chain == TokenTree((4, 4, 2), (-1, 0, 1))
    assert chain.is_chain
    assert chain.depths == [1, 2, 3]
    assert not BRANCHED.is_chain
    assert not TokenTree((1, 2, 3), (-1, 0, 0)).is_chain
    assert TokenTree.chain([]).is_chain


def test_depths_and_first_path():
    assert BRANCHED.depths == [1, 1, 2, 2, 2, 3, 3]
    assert [BRANCHED.tokens[node] for node in BRANCHED.first_path()] == [5, 7, 5]


@pytest.mark.parametrize("length", range(8))
def test_every_prefix_is_a_tree(length):
    prefix = BRANCHED.prefix(length)
    prefix.check_integrity()
    assert paths(prefix) == paths(BRANCHED)[:length]


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ((1, 2), (-1,)),  # one parent is missing
        ((1, 2), (1, -1)),  # the parent comes later
        ((1, 2), (-1, 1)),  # its own parent
        ((1, 2), (-1, -2)),  # no such parent
        ((1, 2, 2), (-1, 0, 0)),  # equal siblings
        ((3, 3), (-1, -1)),  # equal siblings below the root
    ],
)
def test_check_integrity_finds(tokens, parents):
    with pytest.raises(AssertionError):
        TokenTree(tokens, parents).check_integrity()


def test_equal_tokens_below_different_parents_are_fine():
    BRANCHED.check_integrity()


def test_cut_keeps_the_prefix_of_each_request():
    limits = torch.tensor([0, 3, 7, 9])
    cut = on_device([BRANCHED] * 4).cut(limits)
    assert on_host(cut) == [BRANCHED.prefix(limit) for limit in limits.tolist()]
    assert torch.equal(cut.valid.sum(1), limits.clamp(max=7))


def test_padding_adds_no_node():
    batch = on_device([BRANCHED, BRANCHED.prefix(2)])
    padded = batch.padded(12)
    assert all(part.shape == (2, 12) for part in padded)
    assert on_host(padded) == [BRANCHED, BRANCHED.prefix(2)]
    assert all(torch.equal(one, other) for one, other in zip(padded, padded.cut(torch.tensor([7, 2])), strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_child(seed):
    trees = [random_tree(nodes, vocabulary=3, seed=seed) for nodes in (5, 8)]
    batch = on_device(trees)
    where = [{path: node for node, path in enumerate(paths(tree))} for tree in trees]
    for node in range(-1, 5):
        for token in (-1, 0, 1, 2):  # the last slots of the first tree are empty, and -1 must not find them
            found = batch.child(torch.tensor([node, node]), torch.tensor([token, token])).tolist()
            here = [paths(tree)[node] if node >= 0 else () for tree in trees]
            assert found == [where[r].get((*here[r], token), -1) for r in range(2)]


@pytest.mark.parametrize("seed", range(20))
def test_branches_are_the_ends_of_the_paths_to_the_leaves(seed):
    tree = random_tree(12, vocabulary=3, seed=seed)
    visited: list[int] = []
    for branch in tree.branches():
        path = tree.path_to(branch[-1])
        assert [tree.depths[node] for node in path] == list(range(1, len(path) + 1))
        assert all(tree.parents[node] == above for above, node in zip((-1, *path), path, strict=False))
        assert path[-len(branch) :] == branch
        assert set(path[: -len(branch)]) <= set(visited), "what stands above has had its turn"
        visited += branch
    assert sorted(visited) == list(range(len(tree)))
    assert len(tree.branches()) == len(set(range(len(tree))) - set(tree.parents)), "one branch a leaf"
    assert tree.branches()[0] == tree.first_path()


def test_branches_of_a_chain():
    assert TokenTree.chain([3, 1, 2]).branches() == [[0, 1, 2]]
    assert BRANCHED.branches() == [[0, 2, 6], [3, 5], [1, 4]]


def test_branches_of_a_batch():
    trees = [BRANCHED, TokenTree((), ()), TokenTree.chain([3, 1]), *(random_tree(9, 3, seed) for seed in range(40))]
    parents = np.array([parent for tree in trees for parent in tree.parents])
    found = Branches.of(parents, [len(tree) for tree in trees])
    assert found.lists() == [tree.branches() for tree in trees]
    assert found.depth.tolist() == [depth for tree in trees for depth in tree.depths]
    assert found.chain.tolist() == [tree.is_chain for tree in trees]
    assert Branches.of(parents[:0], []).lists() == []


def test_ancestor_mask():
    trees = [BRANCHED, TokenTree.chain([3, 4]), TokenTree((), ()), *(random_tree(7, 4, seed) for seed in range(6))]
    seen = ancestor_mask(on_device(trees, 7).parent).tolist()
    for tree, rows in zip(trees, seen, strict=True):
        assert rows[0] == [True, *[False] * 7]
        for node in range(7):
            above, at = {1 + node}, node
            while at >= 0:
                at = tree.parents[at] if at < len(tree) else -1
                above.add(1 + at)
            assert {column for column, sees in enumerate(rows[1 + node]) if sees} == above
