"""Compiled code for a CPU against the same in tensors."""

from itertools import product

import pytest
import torch

from tests.oracles.growth import as_the_engine, grow
from vllm_adaptive_tree.proposers import opt_tree_cpu
from vllm_adaptive_tree.proposers.adaptive_tree import AdaptiveTree
from vllm_adaptive_tree.proposers.eagle2 import Eagle2
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.testing.models import ToyDrafter, ToyLM

VOCABULARIES = [(3, 4), (33, 2), (64, 2), (100, 2)]  # and depths that are tabulated


class Wide(ToyDrafter):
    """Laws too long to be tabulated by history: those of a few models in turn."""

    def grow(self, tokens, parent, state):
        rows, state = super().grow(tokens, parent, state)
        histories, vocabulary = self.logits.shape[1:]
        return rows, state % ((histories - 1) // vocabulary)


def both(models, **options):
    """The proposals of OPT-Tree on any device and on the host."""
    limits, floor = {name: options.pop(name) for name in ("max_depth", "threshold")}, options.pop("floor", -torch.inf)
    proposers = OptTree(**limits), OptTree(**limits).for_cpu()
    for one in proposers:
        one.floor = floor
    assert type(proposers[1]) is opt_tree_cpu.OptTreeCPU
    return [grow(one, models, drafter=Wide(models), agree=as_the_engine, **options) for one in proposers]


def assert_same(ours, theirs):
    for one, other in zip((*ours.tree, *ours[1:3]), (*theirs.tree, *theirs[1:3]), strict=True):
        # the order of a sum differs, so values do by rounding; no token does
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 if one.is_floating_point() else 0)


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize(("size", "nodes"), [*product(VOCABULARIES, [1, 4, 16])])
def test_the_same_trees(size, nodes, threshold):
    models = [ToyLM.random(*size, seed=seed, scale=0.5 + seed % 5, dtype=torch.float32) for seed in range(10)]
    temperature = [0.4 + 0.1 * seed for seed in range(10)]
    for max_depth in (1, 2, 5):
        limits = {"nodes": nodes, "max_depth": max_depth, "threshold": threshold, "temperature": temperature}
        generic, compiled = both(models, **limits)
        assert_same(compiled, generic)
        assert (compiled.tree.tokens >= 0).any()


@pytest.mark.parametrize("floor", [-0.5, -1.5, -3.0])
def test_the_same_trees_above_a_floor(floor):
    models = [ToyLM.random(33, 2, seed=seed, scale=3.0, dtype=torch.float32) for seed in range(10)]
    limits = {"nodes": 16, "max_depth": 5, "threshold": 0.0}
    generic, compiled = both(models, **limits, floor=floor)
    assert_same(compiled, generic)
    whole = both(models, **limits)[1]
    assert (compiled.read >= 0).sum() < (whole.read >= 0).sum()


def test_banned_tokens_are_no_candidates():
    models = [ToyLM.random(40, 2, seed=seed, dtype=torch.float32) for seed in range(4)]
    for model in models:
        model.logits[:, 3:] = -torch.inf
    generic, compiled = both(models, nodes=8, max_depth=3, threshold=0.0)
    assert_same(compiled, generic)
    assert compiled.tree.tokens.max() == 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_same_trees_where_rows_are_dead(value):
    models = [ToyLM.random(33, 2, seed=seed, scale=3.0, dtype=torch.float32) for seed in range(10)]
    for number, model in enumerate(models):
        best = int(model.logits[0].argmax())
        model.logits[[0, 1 + best, 1 + best, 20, -1][number % 5]] = value
    generic, compiled = both(models, nodes=16, max_depth=4, threshold=0.0)
    assert_same(compiled, generic)
    empty = (compiled.tree.tokens < 0).all(1)
    assert empty.tolist() == [True, False, False, False, False] * 2
    assert (compiled.num_planned[:, 0] > 0).tolist() == (~empty).tolist()


def test_of_equals_the_parent_stays_in_front():
    """A certain draft: every path has probability 1."""
    model = ToyLM(torch.tensor([100.0, 0.0, 0.0]).repeat(121, 1))
    tree = both([model], nodes=3, max_depth=5, threshold=0.0)[1].tree
    assert tree.tokens.tolist() == [[0, 0, 0]]
    assert tree.parent.tolist() == [[-1, 0, 1]]


def test_of_equal_siblings_the_smaller_token_comes_first():
    model = ToyLM(torch.zeros(101, 100))
    tree = both([model], nodes=6, max_depth=1, threshold=0.0)[1].tree
    assert tree.tokens.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_others_are_left_as_they_are():
    proposer = Eagle2(max_depth=3, top_k=2)
    assert proposer.for_cpu() is proposer


@pytest.mark.parametrize("scale", [16.0, 40.0])
@pytest.mark.parametrize("chooses", ["opt_tree", "adaptive_tree"])
def test_no_child_is_worth_more_than_its_parent(chooses, scale):
    """A token that is nearly certain: its probability must not round above 1."""
    generator = torch.Generator().manual_seed(0)
    adaptive = AdaptiveTree(max_depth=8, max_children=16, drawn_from=0.4)
    made = (OptTree(max_depth=8, threshold=0.0) if chooses == "opt_tree" else adaptive).for_cpu()
    for vocabulary in (3, 100):
        models = []
        for seed in range(16):
            model = ToyLM.random(vocabulary, 2, seed=seed, scale=1.0, dtype=torch.float32)
            best = torch.randint(vocabulary, (len(model.logits), 1), generator=generator)
            model.logits.scatter_add_(1, best, scale * torch.rand(len(best), 1, generator=generator))
            models.append(model)
        tree = grow(made, models, nodes=12, drafter=Wide(models), agree=as_the_engine).tree
        assert (tree.parent < torch.arange(12)).all(), "parents come first"
        above = tree.log_weight.gather(1, tree.parent.clamp(min=0)).where(tree.parent >= 0, torch.zeros(()))
        assert (tree.log_weight <= above)[tree.valid].all()
        assert tree.depth.max() > 4
