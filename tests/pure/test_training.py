"""Training of gates: what is held out, thinned and chosen, and the file that comes of it."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_adaptive_tree.gates import training
from vllm_adaptive_tree.gates.training import GateRecipe, Score
from vllm_adaptive_tree.proposers.gate import Gate

torch.set_num_threads(1)  # tiny models

QUICK = GateRecipe(rate=1e-2, decay=1.0, plateau=0, patience=4, epochs=4, batch=64)


def columns_of(count: int = 4000, seed: int = 0) -> dict[str, torch.Tensor]:
    """Features as C2T's in size; positive where the first is large, one in twelve or so."""
    random = torch.Generator().manual_seed(seed)
    features = torch.rand(count, 3, generator=random) ** 3 * torch.tensor([0.01, 7.0, 10.0])
    return {
        "features": features,
        "label": (features[:, 0] > 0.0078).float(),
        "prompt": torch.arange(count) // 100,
    }


def fresh(*sizes: int) -> Callable[[int], Gate]:
    return lambda seed: training.new_gate(*sizes, seed=seed)


def features_held_out(columns: dict[str, torch.Tensor]) -> torch.Tensor:
    return columns["features"][training.held_out(columns["prompt"])]


def test_c2t_s_gate_learns():
    columns = columns_of()
    trained = training.train_c2t(columns, begin=fresh(3, 48), negatives=4, recipe=QUICK)
    assert len(trained.run.epochs) == 1 + QUICK.epochs
    assert trained.run.epochs[0].score.recall < 0.9 or trained.run.epochs[0].score.positive_rate > 0.2
    recall, rate = trained.best.score
    assert recall > 0.95
    assert rate < 0.15
    gate = trained.best.gate
    assert [tuple(weight.shape) for weight in gate.state_dict().values()] == [(48, 3), (48,), (1, 48), (1,)]
    assert training.score(gate(columns["features"]), columns["label"], 0.5).recall > 0.95, "as the features come"
    assert not any(weight.requires_grad for weight in gate.parameters())


def test_training_is_repeatable():
    first, again = (
        training.train_c2t(columns_of(1000), begin=fresh(3, 8), negatives=2, recipe=QUICK, seeds=[3]).confidence
        for _ in range(2)
    )
    assert first.equal(again)


def test_training_ends_when_the_held_out_loss_falls_no_more(monkeypatch):
    """The best epoch is taken; the rate falls before the training ends."""
    losses = iter([0.6, 0.5, 0.3, 0.4, 0.35, 0.31, 0.32, 0.9])  # the constant's comes last
    monkeypatch.setattr(training, "_loss", lambda *_: next(losses))
    rates: list[float] = []
    adam = torch.optim.Adam
    monkeypatch.setattr(
        adam, "step", lambda self, own=adam.step: (rates.append(self.param_groups[0]["lr"]), own(self))[1]
    )
    recipe = GateRecipe(rate=1e-2, decay=0.5, plateau=2, patience=4, epochs=50, batch=64)
    run = training.train_c2t(columns_of(500), begin=fresh(3, 4), negatives=2, recipe=recipe).run
    assert [epoch.number for epoch in run.epochs] == list(range(7))
    assert (run.best.number, run.best.loss, run.constant) == (2, 0.3, 0.9)
    assert sorted(set(rates), reverse=True) == [1e-2, 5e-3]


def test_of_several_seeds_the_smallest_held_out_loss_is_taken():
    seen: list[int] = []
    trained = training.train_c2t(
        columns_of(1000),
        begin=fresh(3, 4),
        negatives=2,
        recipe=QUICK,
        seeds=range(3),
        watch=lambda seed, epoch: seen.append(seed),
    )
    assert seen == [0] * 5 + [1] * 5 + [2] * 5
    assert [run.seed for run in trained.runs] == [0, 1, 2]
    losses = [run.best.loss for run in trained.runs]
    assert len(set(losses)) == 3
    assert trained.best.loss == min(losses)
    assert trained.confidence.equal(trained.best.gate(features_held_out(columns_of(1000))))


def dead(gate: Gate) -> Gate:
    """No unit is ever switched on, so nothing is ever learnt."""
    gate.requires_grad_(requires_grad=False)
    gate.layers[0].bias.fill_(-1e3)
    return gate


def test_a_dead_net_is_a_failed_training_and_never_handed_out():
    def begin(seed: int) -> Gate:
        gate = training.new_gate(3, 2, seed=seed)
        return dead(gate) if seed == 0 else gate

    columns = columns_of()
    trained = training.train_c2t(columns, begin=begin, negatives=2, recipe=QUICK, seeds=range(2))
    first, second = trained.runs
    assert (first.alive, first.failed) == ([(0, 2)], "all units of a layer are dead")
    assert (second.alive[0][0] > 0, second.failed, trained.run.seed) == (True, None, 1)
    with pytest.raises(ValueError, match=r"no gate has learnt anything \(seed 0: held-out loss .*dead\); collect more"):
        training.train_c2t(columns, begin=begin, negatives=2, recipe=QUICK)
    with pytest.raises(ValueError, match=r"no gate has learnt anything"):
        training.train_mcsd(columns, begin=begin, balance=True, recipe=QUICK)


def test_no_better_than_a_constant_is_a_failed_training():
    columns = columns_of(1000)
    columns["features"] = torch.zeros_like(columns["features"])  # nothing to tell them apart by
    with pytest.raises(
        ValueError, match=r"seed 0: held-out loss 0\.6\d+, a constant's 0\.6365, no better than a const"
    ):
        training.train_c2t(columns, begin=fresh(3, 4), negatives=2, recipe=QUICK)


@pytest.mark.parametrize("negatives", [1, 2, 8])
def test_a_confidence_means_the_same_however_many_negatives_are_kept(negatives):
    """Two for each positive: of features that say nothing, one third."""
    random = torch.Generator().manual_seed(0)
    columns = {
        "features": torch.rand(20000, 3, generator=random),
        "label": (torch.rand(20000, generator=random) < 0.1).float(),
        "prompt": torch.arange(20000) // 500,
    }
    columns["features"][:, 0] += columns["label"] * (torch.rand(20000, generator=random) < 0.2)  # or it has failed
    confidence = training.train_c2t(columns, begin=fresh(3, 8), negatives=negatives, recipe=QUICK).best.gate
    assert confidence(torch.tensor([[0.5, 0.5, 0.5]])).item() == pytest.approx(0.8 / (0.8 + 2), abs=0.05)
    assert training.balanced(torch.tensor([1.0, 0, 0, 0, 0])).tolist() == [1.0, 0.5, 0.5, 0.5, 0.5]


def test_fine_tuning_starts_from_the_gate_that_is_given():
    columns = columns_of()
    first = training.train_c2t(columns, begin=fresh(3, 48), negatives=4, recipe=QUICK).best
    slow = QUICK._replace(rate=1e-6)
    tuned = training.train_c2t(columns, begin=lambda seed: first.gate, negatives=4, recipe=slow)
    assert tuned.run.epochs[0].score == pytest.approx(first.score, abs=1e-3), "the scaling of features changes nothing"
    for before, after in zip(first.gate.parameters(), tuned.best.gate.parameters(), strict=True):
        assert torch.allclose(before, after, rtol=0.05, atol=1e-3)
    assert training.C2T._replace(rate=1e-4) == training.C2T_FINE_TUNING
    moved = training.train_c2t(columns, begin=lambda seed: first.gate, negatives=4, recipe=QUICK)
    assert moved.run.epochs[-1].loss < tuned.run.epochs[0].loss


@pytest.mark.parametrize("balance", [True, False])
def test_mcsd_s_gate_learns(balance):
    columns = columns_of()
    if not balance:
        columns["label"] = columns["features"][:, 0] / 0.01  # soft
    trained = training.train_mcsd(columns, begin=fresh(3, 12), balance=balance, recipe=QUICK)
    assert trained.best.loss == min(epoch.loss for epoch in trained.run.epochs[1:]) < trained.run.epochs[0].loss
    if balance:
        assert trained.label.mean() == 0.5
        assert trained.best.score.recall > 0.95
    else:
        assert (trained.confidence - trained.label).abs().mean() < 0.05


def test_rows_that_are_no_numbers_are_dropped():
    columns = columns_of(1000)
    columns["features"][7, 1] = math.nan
    trained = training.train_c2t(columns, begin=fresh(3, 4), negatives=2, recipe=QUICK)
    assert math.isfinite(trained.best.loss)


def test_a_feature_that_never_varied_stays_harmless():
    columns = columns_of(1000)
    columns["features"][:, 2] = 4.0
    gate = training.train_c2t(columns, begin=fresh(3, 8), negatives=2, recipe=QUICK).best.gate
    features = torch.tensor([[0.0075, 1.0, 4.0], [0.0075, 1.0, 4.5]])
    below, above = gate(features).tolist()
    assert 0.02 < below < 0.98
    assert below == pytest.approx(above, abs=0.2)


def test_the_rate_falls_as_the_recipe_says(monkeypatch):
    monkeypatch.setattr(training, "MAX_LOSS_RATIO", math.inf)

    def steps(decay: float) -> list[float]:
        recipe = QUICK._replace(decay=decay, epochs=3)
        trained = training.train_mcsd(columns_of(1000), begin=fresh(3, 8), balance=True, recipe=recipe)
        weights = [torch.cat([part.flatten() for part in epoch.gate.parameters()]) for epoch in trained.run.epochs]
        return [float((after - before).norm()) for before, after in pairwise(weights)]

    first, second, third = steps(1e-3)
    assert second < 0.1 * first
    assert third < 0.1 * second
    assert steps(1.0)[2] > 0.1 * first
    assert training.MCSD[:3] == (1e-3, 0.5, 0)


def test_one_prompt_in_twenty_is_held_out_and_no_text_stands_on_both_sides():
    prompt = torch.arange(40).repeat_interleave(3)
    held = training.held_out(prompt)
    assert len(prompt[held].unique()) == 2
    assert not set(prompt[held].tolist()) & set(prompt[~held].tolist())
    assert training.held_out(prompt[:6]).sum() == 3
    with pytest.raises(ValueError, match=r"two prompts at least"):
        training.held_out(prompt[:3])


@pytest.mark.parametrize(
    ("negatives", "positives", "expected"),
    [(1, math.inf, (20, 20)), (3, math.inf, (20, 60)), (9, math.inf, (20, 80)), (1, 1, (20, 20)), (9, 0.1, (8, 80))],
)
def test_thinning(negatives, positives, expected):
    label = torch.tensor([1.0] * 20 + [0.0] * 80)
    places = training.subsample(label, negatives=negatives, positives=positives, seed=1)
    assert (int(label[places].sum()), int((1 - label[places]).sum())) == expected
    assert len(places.unique()) == len(places)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_one_class_alone_teaches_nothing(value):
    with pytest.raises(ValueError, match=r"both are needed\. Collect more.*draft and target belong together"):
        training.subsample(torch.full((9,), value), negatives=1, seed=0)


def test_score_counts_soft_labels_as_parts_of_a_positive():
    label, confidence = torch.tensor([1.0, 0.5, 0.0, 0.5]), torch.tensor([0.9, 0.4, 0.6, 0.1])
    assert training.score(confidence, label, 0.4) == pytest.approx(Score(0.75, 0.75))
    assert training.score(confidence, label, 0.95) == Score(0.0, 0.0)
    assert training.score(confidence, torch.zeros(4), 0.4).recall == 0.0


def test_a_gate_s_file_says_how_it_was_made(tmp_path):
    file = tmp_path / "gate.safetensors"
    gate = training.new_gate(3, 48)
    gate.save(file, {"kind": "c2t", "trees": 9})
    read = Gate.load(file, inputs=3)
    features = torch.rand(5, 3)
    assert read(features).equal(gate(features))
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"about": '{"kind": "c2t", "trees": 9}', "features": "paper"}


def test_a_gate_knows_its_features(tmp_path):
    file = tmp_path / "gate.safetensors"
    gate = training.new_gate(3, 48, features="log")
    gate.save(file, {})
    assert Gate.load(file, inputs=3).features == "log"
    columns = columns_of(1000)
    trained = training.train_c2t(columns, begin=lambda seed: gate, negatives=2, recipe=QUICK)
    assert trained.best.gate.features == "log"
    save_file(gate.state_dict(), file)  # as of old: nothing is said
    assert Gate.load(file, inputs=3).features == "paper"
    gate.features = "cosine"
    gate.save(file, {})
    with pytest.raises(
        ValueError, match=r"gate.safetensors' reads features 'cosine', which this version does not know"
    ):
        Gate.load(file, inputs=3)


def test_a_gate_with_numbers_that_are_not_finite(tmp_path):
    gate = training.new_gate(3, 4).requires_grad_(requires_grad=False)
    gate.layers[0].weight[0, 0] = math.nan
    gate.save(tmp_path / "gate.safetensors", {})
    with pytest.raises(ValueError, match=r"gate.safetensors' holds numbers that are not finite; train it again"):
        Gate.load(tmp_path / "gate.safetensors", inputs=3)
