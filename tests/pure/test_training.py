"""Training of gates: what is held out, thinned and chosen, and the file that comes of it."""

import math
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open

from vllm_adaptive_tree.gates import training
from vllm_adaptive_tree.gates.mlp import Gate
from vllm_adaptive_tree.gates.training import Recipe, Score

torch.set_num_threads(1)  # tiny models

QUICK = Recipe(1e-2, 1.0, 4, 64)


def columns_of(count: int = 4000, seed: int = 0) -> dict[str, torch.Tensor]:
    """Features as C2T's in size; positive where the first is large, one in twelve or so."""
    random = torch.Generator().manual_seed(seed)
    features = torch.rand(count, 3, generator=random) ** 3 * torch.tensor([0.01, 7.0, 10.0])
    return {
        "features": features,
        "label": (features[:, 0] > 0.0078).float(),
        "prompt": torch.arange(count) // 100,
    }


def test_c2t_s_gate_learns():
    columns = columns_of()
    trained = training.train_c2t(columns, gate=training.fresh(3, 48), negatives=4, recipe=QUICK)
    assert len(trained.epochs) == 1 + QUICK.epochs
    assert trained.epochs[0].score.recall < 0.9 or trained.epochs[0].score.positive_rate > 0.2
    recall, rate = trained.best.score
    assert recall > 0.95
    assert rate < 0.15
    gate = trained.best.gate
    assert [tuple(weight.shape) for weight in gate.state_dict().values()] == [(48, 3), (48,), (1, 48), (1,)]
    assert training.score(gate(columns["features"]), columns["label"], 0.5).recall > 0.95, "as the features come"
    assert not any(weight.requires_grad for weight in gate.parameters())


def test_training_is_repeatable():
    first, again = (
        training.train_c2t(columns_of(1000), gate=training.fresh(3, 8), negatives=2, recipe=QUICK, seed=3).confidence
        for _ in range(2)
    )
    assert first.equal(again)


def test_the_epoch_with_the_highest_recall_is_taken_then_the_one_that_passes_less(monkeypatch):
    """Of the second half: at first everything may pass."""
    first = [Score(1.0, 0.9)] * 4
    given = iter([*first, Score(0.8, 0.4), Score(0.8, 0.3), Score(0.7, 0.1)])
    monkeypatch.setattr(training, "score", lambda *_: next(given))
    recipe = QUICK._replace(epochs=6)
    trained = training.train_c2t(columns_of(500), gate=training.fresh(3, 4), negatives=2, recipe=recipe)
    assert trained.best.number == 5


def test_fine_tuning_starts_from_the_gate_that_is_given():
    columns = columns_of()
    first = training.train_c2t(columns, gate=training.fresh(3, 48), negatives=4, recipe=QUICK).best
    slow = QUICK._replace(rate=1e-6)
    tuned = training.train_c2t(columns, gate=first.gate, negatives=4, recipe=slow)
    assert tuned.epochs[0].score == pytest.approx(first.score, abs=1e-3), "the scaling of features changes nothing"
    for before, after in zip(first.gate.parameters(), tuned.best.gate.parameters(), strict=True):
        assert torch.allclose(before, after, rtol=0.05, atol=1e-3)
    assert Recipe(1e-4, 1.0, 10, 1024) == training.C2T_FINE_TUNING
    moved = training.train_c2t(columns, gate=first.gate, negatives=4, recipe=QUICK)
    assert moved.epochs[-1].loss < tuned.epochs[0].loss


@pytest.mark.parametrize("balance", [True, False])
def test_mcsd_s_gate_learns(balance):
    columns = columns_of()
    if not balance:
        columns["label"] = columns["features"][:, 0] / 0.01  # soft
    trained = training.train_mcsd(columns, gate=training.fresh(3, 12), balance=balance, recipe=QUICK)
    assert trained.best.loss == min(epoch.loss for epoch in trained.epochs[1:]) < trained.epochs[0].loss
    if balance:
        assert trained.label.mean() == 0.5
        assert trained.best.score.recall > 0.95
    else:
        assert (trained.confidence - trained.label).abs().mean() < 0.05


def test_rows_that_are_no_numbers_are_dropped():
    columns = columns_of(1000)
    columns["features"][7, 1] = math.nan
    trained = training.train_c2t(columns, gate=training.fresh(3, 4), negatives=2, recipe=QUICK)
    assert math.isfinite(trained.best.loss)


def test_a_feature_that_never_varied_stays_harmless():
    columns = columns_of(1000)
    columns["features"][:, 2] = 4.0
    gate = training.train_c2t(columns, gate=training.fresh(3, 8), negatives=2, recipe=QUICK).best.gate
    features = torch.tensor([[0.0075, 1.0, 4.0], [0.0075, 1.0, 4.5]])
    below, above = gate(features).tolist()
    assert 0.02 < below < 0.98
    assert below == pytest.approx(above, abs=0.2)


def test_the_rate_falls_as_the_recipe_says():
    def steps(decay: float) -> list[float]:
        recipe = Recipe(1e-2, decay, 3, 64)
        trained = training.train_mcsd(columns_of(1000), gate=training.fresh(3, 8), balance=True, recipe=recipe)
        weights = [torch.cat([part.flatten() for part in epoch.gate.parameters()]) for epoch in trained.epochs]
        return [float((after - before).norm()) for before, after in pairwise(weights)]

    first, second, third = steps(1e-3)
    assert second < 0.1 * first
    assert third < 0.1 * second
    assert steps(1.0)[2] > 0.1 * first
    assert Recipe(1e-3, 0.5, 10, 200) == training.MCSD


def test_one_prompt_in_twenty_is_held_out_and_no_text_stands_on_both_sides():
    prompt = torch.arange(40).repeat_interleave(3)
    held = training.held_out(prompt, seed=0)
    assert len(prompt[held].unique()) == 2
    assert not set(prompt[held].tolist()) & set(prompt[~held].tolist())
    assert training.held_out(prompt[:6], seed=0).sum() == 3
    with pytest.raises(ValueError, match=r"two prompts at least"):
        training.held_out(prompt[:3], seed=0)


@pytest.mark.parametrize(
    ("negatives", "positives", "expected"),
    [(1, math.inf, (20, 20)), (3, math.inf, (20, 60)), (9, math.inf, (20, 80)), (1, 1, (20, 20)), (9, 0.1, (8, 80))],
)
def test_thinning(negatives, positives, expected):
    label = torch.tensor([1.0] * 20 + [0.0] * 80)
    places = training.thinned(label, negatives=negatives, positives=positives, seed=1)
    assert (int(label[places].sum()), int((1 - label[places]).sum())) == expected
    assert len(places.unique()) == len(places)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_one_class_alone_teaches_nothing(value):
    with pytest.raises(ValueError, match=r"both are needed\. Collect more.*draft and target belong together"):
        training.thinned(torch.full((9,), value), negatives=1, seed=0)


def test_score_counts_soft_labels_as_parts_of_a_positive():
    label, confidence = torch.tensor([1.0, 0.5, 0.0, 0.5]), torch.tensor([0.9, 0.4, 0.6, 0.1])
    assert training.score(confidence, label, 0.4) == pytest.approx(Score(0.75, 0.75))
    assert training.score(confidence, label, 0.95) == Score(0.0, 0.0)
    assert training.score(confidence, torch.zeros(4), 0.4).recall == 0.0


def test_a_gate_s_file_says_how_it_was_made(tmp_path):
    file = tmp_path / "gate.safetensors"
    gate = training.fresh(3, 48)
    gate.save(file, {"kind": "c2t", "trees": 9})
    read = Gate.load(file, inputs=3)
    features = torch.rand(5, 3)
    assert read(features).equal(gate(features))
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"about": '{"kind": "c2t", "trees": 9}'}


def test_a_gate_with_numbers_that_are_not_finite(tmp_path):
    gate = training.fresh(3, 4).requires_grad_(requires_grad=False)
    gate.layers[0].weight[0, 0] = math.nan
    gate.save(tmp_path / "gate.safetensors", {})
    with pytest.raises(ValueError, match=r"gate.safetensors' holds numbers that are not finite; train it again"):
        Gate.load(tmp_path / "gate.safetensors", inputs=3)
