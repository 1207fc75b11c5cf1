"""The walk from the root, and the whole law of what OPT-Tree and `target_only` emit, by enumeration."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.oracles.growth import grow_trees
from tests.oracles.trees import on_device, on_host, paths, random_tree
from vllm_adaptive_tree.acceptance import Accepted, TargetOnly, walk
from vllm_adaptive_tree.testing.drafts import Drafts, every_cut
from vllm_adaptive_tree.testing.models import Path, ToyLM
from vllm_adaptive_tree.testing.steps import Emitted, emitted
from vllm_adaptive_tree.trees import TokenTree, TreeBatch

Draw = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

SETTINGS = [(3, 2, 0), (4, 2, 1), (3, 3, 2)]  # vocabulary, depth, seed


def pair(vocabulary: int, depth: int, seed: int) -> tuple[ToyLM, TreeBatch]:
    """A target, and a draft's tree for it."""
    draft = ToyLM.random(vocabulary, depth, seed=seed, scale=1.5)
    target = ToyLM(draft.logits + ToyLM.random(vocabulary, depth, seed=seed + 100, scale=1.5).logits)
    return target, grow_trees([draft], nodes=6, max_depth=depth)


def by_target(tree: TreeBatch, target: ToyLM, length: int) -> Emitted:
    """Tokens that `target_only` emits of every cut of one tree; the origin of the tree does not matter."""
    entries = torch.zeros(1, 1 + tree.tokens.shape[1], dtype=torch.int64)
    q = entries[..., None].expand(-1, -1, target.vocabulary).double()
    one = torch.ones(1, dtype=torch.float64)
    drafts = Drafts(one, torch.zeros(1, dtype=torch.int64), tree, q, entries, torch.zeros_like(tree.valid), 1)
    return emitted(every_cut(drafts, groups=1), [target], TargetOnly, "one_hot", length=length)


def error(tree: TreeBatch, target: ToyLM, length: int, *, drawn_from: ToyLM | None = None) -> float:
    """The largest total variation of any cut."""
    law = by_target(tree, drawn_from or target, length).probs
    return (law - target.continuations(length)).abs().sum(1).max().item() / 2


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_cut_of_the_tree_keeps_the_law(setting):
    target, tree = pair(*setting)
    assert on_host(tree)[0].depths.count(2) > 1
    assert error(tree, target, length=setting[1] + 1) < 1e-9


@pytest.mark.parametrize("setting", SETTINGS)
def test_chains_keep_the_law(setting):
    target, tree = pair(*setting)
    (tree,) = on_host(tree)
    chain = TokenTree.chain([tree.tokens[node] for node in tree.first_path()])
    assert error(on_device([chain]), target, length=setting[1] + 1) < 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_any_tree_keeps_the_law(seed):
    target = ToyLM.random(3, 6, seed=seed)
    assert error(on_device([random_tree(5, vocabulary=3, seed=seed)]), target, length=4) < 1e-9


@pytest.mark.parametrize("setting", SETTINGS)
def test_mean_acceptance_is_the_targets_mass_on_the_tree(setting):
    target, tree = pair(*setting)
    masses = [target.probability(path) for path in paths(on_host(tree)[0])]
    expected = [sum(masses[:nodes]) for nodes in range(len(masses) + 1)]
    assert by_target(tree, target, length=1).accepted.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_check_sees_draws_from_the_draft(setting):
    target, tree = pair(*setting)
    draft = ToyLM.random(setting[0], setting[1], seed=setting[2], scale=1.5)
    assert error(tree, target, length=setting[1] + 1, drawn_from=draft) > 1e-2


def tokens_of(accepted: Accepted) -> list[Path]:
    return [tuple(token for token in row if token >= 0) for row in accepted.tokens.tolist()]


def test_a_greedy_target_emits_its_argmax_chain():
    targets = [ToyLM.random(3, 5, seed=seed) for seed in range(8)]
    drafts = [ToyLM(t.logits + ToyLM.random(3, 5, seed=90 + r).logits) for r, t in enumerate(targets)]
    tree = grow_trees(drafts, nodes=6, max_depth=4)
    trees = on_host(tree)
    histories = [[0, *(t.history(path) for path in paths(one))] for t, one in zip(targets, trees, strict=True)]

    def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        rows = [t.logits[h[at + 1]] for t, h, at in zip(targets, histories, node.tolist(), strict=True)]
        return torch.stack(rows).argmax(1), torch.ones_like(active)

    accepted = walk(tree, draw, levels=4)
    everywhere = [[int(t.logits[at].argmax()) for at in h] for t, h in zip(targets, histories, strict=True)]
    along = [one.follow(tokens) for one, tokens in zip(trees, everywhere, strict=True)]
    assert along == [[node for node in nodes if node >= 0] for nodes in accepted.nodes.tolist()]
    lengths = set()
    for r, tokens in enumerate(tokens_of(accepted)):
        for at, token in enumerate(tokens):
            assert token == targets[r].logits[targets[r].history(tokens[:at])].argmax()
        assert tokens not in paths(trees[r]), "the last token is the one that the tree lacks"
        nodes = [node for node in accepted.nodes[r].tolist() if node >= 0]
        assert [paths(trees[r])[node] for node in nodes] == [tokens[:n] for n in range(1, len(tokens))]
        lengths.add(len(tokens))
    assert len(lengths) > 2


def walk_chains(draw: Draw, **options: Callable[[Tensor], bool]) -> Accepted:
    return walk(on_device([TokenTree.chain([1, 1, 1]), TokenTree.chain([1])]), draw, levels=3, **options)


def always_one(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(node), torch.ones_like(active)


def test_padding_behind_the_walk():
    accepted = walk_chains(always_one)
    assert accepted.tokens.tolist() == [[1, 1, 1, 1], [1, 1, -1, -1]]
    assert accepted.nodes.tolist() == [[0, 1, 2, -1], [0, -1, -1, -1]]


def test_rows_that_have_ended_stay_ended():
    """The first request leaves the tree at once; what is drawn for it afterwards would lead back into the tree."""
    draws = iter([[0, 1], [1, 1], [1, 1], [1, 1]])
    tree = on_device([TokenTree.chain([1, 1, 1])] * 2)
    accepted = walk(tree, lambda node, active: (torch.tensor(next(draws)), torch.ones_like(active)), levels=3)
    assert accepted.tokens.tolist() == [[0, -1, -1, -1], [1, 1, 1, 1]]
    assert accepted.nodes.tolist() == [[-1, -1, -1, -1], [0, 1, 2, -1]]


@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_may_go_on_ends_the_walk_behind_the_token(last):
    """The first request may not go on below depth `last`; the second request does not notice."""
    depth_of_node = torch.tensor([1, 2, 3, 0])  # -1 is the root
    accepted = walk_chains(lambda node, active: (torch.ones_like(node), depth_of_node[node] < torch.tensor([last, 9])))
    assert tokens_of(accepted) == [(1,) * (last + 1), (1, 1)]
    assert (accepted.nodes >= 0).sum(1).tolist() == [last, 1]


def test_proceed_only_saves_the_idle_rounds():
    stopped = walk_chains(lambda node, active: (2 - active.long(), active), proceed=lambda active: bool(active.any()))
    assert stopped.tokens.tolist() == walk_chains(always_one).tokens.tolist()
    short = walk(
        on_device([TokenTree.chain([0, 0, 0])]), always_one, levels=3, proceed=lambda active: bool(active.any())
    )
    assert short.tokens.tolist() == [[1]]
    assert short.nodes.tolist() == [[-1]]
