"""MCSD's k-configs and forks, and the decision model that stops them (arXiv 2409.10644)."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.oracles.growth import Fixed, Recorder, as_the_engine, grow, models_of
from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.proposers import StaticTree
from vllm_adaptive_tree.proposers.gate import Gate
from vllm_adaptive_tree.proposers.mcsd import Mcsd, decision_features
from vllm_adaptive_tree.testing.models import Path, ToyLM
from vllm_adaptive_tree.testing.well_formed import paths_of
from vllm_adaptive_tree.trees import Shape

AGREE = pytest.mark.parametrize("options", [{}, {"agree": as_the_engine}])


def confident(features: torch.Tensor) -> torch.Tensor:
    """Believes in a sequence whose next token is likely."""
    return (features[..., 1] > 0.6).double()


def stops_at(model: ToyLM, tree: list[Path], believes: Callable[[ToyLM, Path], bool], deepest: int) -> int:
    """The first level drawn from laws of which the decision model believes in none."""
    for depth in range(1, deepest):
        if not any(believes(model, path) for path in ((), *tree) if len(path) == depth - 1):
            return depth
    return deepest


@pytest.mark.parametrize(
    ("widths", "sizes"),
    [((4, 2, 2, 1), [4, 8, 16, 16]), ((3, 1, 1, 1), [3, 3, 3, 3]), ((1, 1, 1), [1, 1, 1]), ((2, 3), [2, 6])],
)
def test_layers(widths, sizes):
    models = models_of(5, len(widths), 4)
    for tree in paths_of(grow(Mcsd(Shape.k_config(widths)), models, nodes=100)):
        levels = Counter(len(path) for path in tree)
        assert [levels[depth] for depth in range(1, len(widths) + 1)] == sizes
        assert len(tree) == sum(sizes)


@AGREE
def test_a_fork_is_w_sequences_layer_by_layer(options):
    proposer = Mcsd(Shape.k_config((3, 1, 1, 1)))
    tree = grow(proposer, models_of(5, 4, 8), nodes=12, **options).tree
    assert (tree.parent == torch.tensor([-1, -1, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8])).all()
    assert all(len(set(tokens[:3])) == 3 for tokens in tree.tokens.tolist())


def test_without_a_gate_it_is_a_static_tree():
    models = models_of(4, 3, 6)
    shape = Shape.k_config((3, 2, 1))
    assert paths_of(grow(Mcsd(shape), models, nodes=15)) == paths_of(grow(StaticTree(shape), models, nodes=15))


@AGREE
@pytest.mark.parametrize("widths", [(3, 2, 1, 1), (2, 1, 1, 1)])
def test_it_goes_on_while_the_gate_believes_in_any_sequence(widths, options):
    models = [ToyLM.random(4, 4, seed=seed, scale=1.3) for seed in range(200)]
    shape = Shape.k_config(widths)
    proposer = Mcsd(shape, gate=Fixed(confident), stop_threshold=0.5)
    ours = paths_of(grow(proposer, models, nodes=40, **options))
    whole = paths_of(grow(Mcsd(shape), models, nodes=40))
    depths = Counter()
    for model, tree, full in zip(models, ours, whole, strict=True):
        depth = stops_at(model, full, lambda model, path: model.probs[model.history(path)].max() > 0.6, len(widths))
        assert tree == [path for path in full if len(path) <= depth], "what was drawn stays, and nothing follows"
        depths[depth] += 1
    assert len(depths) == len(widths)


@AGREE
def test_sequences_that_do_not_exist_have_no_say(options):
    """A vocabulary of 2 lacks the third child; the drafter's answer for its column would keep the tree alive."""
    models = [ToyLM.random(2, 4, seed=seed, scale=0.4) for seed in range(40)]
    shape = Shape.k_config((3, 1, 1, 1))
    gate = Fixed(lambda features: (features[..., 1] > 0.75).double())
    ours = paths_of(grow(Mcsd(shape, gate=gate, stop_threshold=0.5), models, nodes=12, **options))
    whole = paths_of(grow(Mcsd(shape), models, nodes=12))
    depths = Counter()
    for model, tree, full in zip(models, ours, whole, strict=True):
        depth = stops_at(model, full, lambda model, path: model.probs[model.history(path)].max() > 0.75, 4)
        assert tree == [path for path in full if len(path) <= depth]
        depths[depth] += 1
    assert len(depths) > 1


@AGREE
def test_at_least_one_layer_and_at_most_all(options):
    models = models_of(4, 3, 3)
    shape = Shape.k_config((3, 2, 1))
    for belief, size, forwards in ((0.0, 3, 0), (1.0, 15, 2)):
        recorder = Recorder(models)
        trees = paths_of(grow(Mcsd(shape, gate=Fixed.always(belief)), models, nodes=15, drafter=recorder, **options))
        assert [len(tree) for tree in trees] == [size] * 3
        assert len(recorder.widths) == (forwards if options else 2)


def test_just_the_threshold_is_not_enough():
    models = models_of(4, 3, 3)
    gate = Fixed.always(0.5)
    for threshold, size in ((0.5, 3), (0.49, 15)):
        proposer = Mcsd(Shape.k_config((3, 2, 1)), gate=gate, stop_threshold=threshold)
        assert [len(tree) for tree in paths_of(grow(proposer, models, nodes=15))] == [size] * 3


def test_nothing_is_read_or_drawn_behind_the_stop():
    models = [ToyLM.random(4, 3, seed=seed, scale=1.0) for seed in range(40)]
    shape = Shape.k_config((3, 2, 1))
    tree, read, drawn, *_ = proposal = grow(Mcsd(shape, gate=Fixed(confident), stop_threshold=0.5), models, nodes=15)
    sizes = Counter(len(paths) for paths in paths_of(proposal))
    assert set(sizes) == {3, 9, 15}
    for r in range(len(models)):
        inner = [node in tree.parent[r].tolist() for node in range(15)]
        assert [number > 0 for number in read[r].tolist()] == inner
        assert [planned > 0 for planned in drawn[r].tolist()] == [True, *inner]


@pytest.mark.parametrize("vocabulary", [4, 10, 30])
def test_the_gate_reads_entropy_and_the_ten_best_probabilities(vocabulary):
    gate = Fixed.always(0.0)
    model = ToyLM.random(vocabulary, 0, seed=0)
    grow(Mcsd(Shape.k_config((2, 1)), gate=gate), [model], nodes=4, temperature=0.7)
    q = (model.logits[0] / 0.7).softmax(-1).tolist()
    best = [*sorted(q, reverse=True), *[0.0] * 10][:10]
    entropy = -math.fsum(x * math.log(x) for x in q)
    assert gate.seen[0].shape == (1, 1, 11)
    assert gate.seen[0].flatten().tolist() == pytest.approx([entropy, *best], abs=1e-12)


def test_tokens_without_mass_have_no_entropy():
    features = decision_features(torch.tensor([0.5, 0.5, 0.0]).log())
    assert features.tolist() == pytest.approx([math.log(2), 0.5, 0.5, *[0.0] * 8])


def test_the_decision_model_takes_the_features_as_they_are():
    gate = Gate(11, 44)
    assert gate(decision_features(torch.randn(2, 3, 20).log_softmax(-1))).shape == (2, 3)
    models = models_of(4, 3, 3)
    assert paths_of(grow(Mcsd(Shape.k_config((3, 2, 1)), gate=gate, stop_threshold=1.0), models, nodes=15))


class HiddenDrafter(Recorder):
    """Its hidden state is the history that a node stands for."""

    def catch_up(self, accepted: Any, target_hidden: torch.Tensor | None) -> tuple[Rows, torch.Tensor]:
        rows, state = super().catch_up(accepted, target_hidden)
        return rows._replace(hidden=torch.zeros(*rows.logits.shape[:2], 1)), state

    def grow(self, tokens: torch.Tensor, parent: torch.Tensor, state: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        rows, state = super().grow(tokens, parent, state)
        return rows._replace(hidden=self.histories[-1][..., None].float()), state


@AGREE
def test_the_first_decision_model_reads_the_hidden_states(options):
    """It believes in histories of even number."""
    models, shape = models_of(4, 4, 60), Shape.k_config((2, 1, 1, 1))
    gate = Fixed(lambda features: (features[..., 0] % 2 == 0).double())
    proposer = Mcsd(shape, gate=gate, reads="hidden")
    ours = paths_of(grow(proposer, models, nodes=8, drafter=HiddenDrafter(models), **options))
    whole = paths_of(grow(Mcsd(shape), models, nodes=8))
    depths = Counter()
    for model, tree, full in zip(models, ours, whole, strict=True):
        depth = stops_at(model, full, lambda model, path: model.history(path) % 2 == 0, 4)
        assert tree == [path for path in full if len(path) <= depth]
        depths[depth] += 1
    assert len(depths) > 2
    assert {features.shape[2] for features in gate.seen} == {1}
