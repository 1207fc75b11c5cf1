"""Model of acceptance: calibrated values, and the draft temperature of greedy requests."""

import pytest
import torch

from vllm_adaptive_tree.budget import Calibration, DraftTemperature
from vllm_adaptive_tree.budget.acceptance_model import DEVIATION, INFORMATION, ROWS


def observed(calibration: Calibration, seed: int, steps: int, chance: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        value = torch.rand(40, generator=generator).double() ** 3
        depth = torch.randint(1, 6, (40,), generator=generator)
        accepted = torch.rand(40, generator=generator) < (value**chance) * 0.9**depth
        calibration.observe(value.tolist(), depth.tolist(), accepted.tolist())


def test_without_observations_a_value_is_its_own_chance():
    value = torch.logspace(-3, -0.02, 50).double()
    for depth in (1, 7, 40):
        found = Calibration()(value, torch.full_like(value, depth).long())
        assert (found / value - 1).abs().max() < 0.25
    assert Calibration()(torch.zeros(1), torch.ones(1).long()).tolist() == [0.0]


@pytest.mark.parametrize("chance", [0.5, 1.0, 2.0])
def test_what_is_predicted_is_what_is_accepted(chance):
    calibration = Calibration()
    observed(calibration, 0, 1000, chance)
    calibration.predicted = calibration.observed = 0.0
    observed(calibration, 1, 500, chance)
    assert 0.95 < calibration.predicted / calibration.observed < 1.05


def test_lucky_bins_promise_nothing():
    """With a running maximum in place of the regression it comes to 1.014."""
    predicted = accepted_nodes = 0.0
    for seed in range(4):
        calibration, values = Calibration(), torch.Generator().manual_seed(seed)
        for _ in range(500):
            value = torch.rand(16, generator=values).double() ** 2
            accepted = torch.rand(16, generator=values) < value
            calibration.observe(value.tolist(), [1 + node // 2 for node in range(16)], accepted.tolist())
        predicted, accepted_nodes = predicted + calibration.predicted, accepted_nodes + calibration.observed
    assert 0.99 < predicted / accepted_nodes < 1.005


def test_it_never_falls_with_the_value():
    calibration = Calibration()
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):  # noise: whatever happens, the order of slots of a depth stays
        value = torch.rand(20, generator=generator)
        calibration.observe(value.tolist(), [1] * 20, (torch.rand(20, generator=generator) < 0.5).tolist())
    value = torch.logspace(-6, 0, 400)
    found = calibration(value, torch.ones(400).long())
    assert (found.diff() >= -1e-12).all()


def test_what_is_predicted_is_the_sum_of_the_chances():
    calibration = Calibration()
    observed(calibration, 0, 20, 0.5)
    value, depth = torch.logspace(-6, 0, 400), torch.arange(1, 21).repeat(20)
    expected = float(calibration(value, depth).sum())
    calibration.predicted = 0.0
    calibration.observe(value.tolist(), depth.tolist(), [False] * 400)
    assert calibration.predicted == pytest.approx(expected)


def test_it_follows_a_change():
    calibration = Calibration()
    observed(calibration, 0, 1000, 2.0)
    observed(calibration, 1, 2000, 0.5)
    value, depth = torch.tensor([0.25]), torch.tensor([1])
    assert float(calibration(value, depth)) == pytest.approx(0.45, abs=0.06)


def test_bins_that_nothing_falls_into_fade_but_more_slowly():
    """They are averaged with the others, so the prior of such a bin must go (without fading: .061), and a lesson must
    stay while other values are seen (fading as fast as the others: .30)."""
    proud, lesson, rng = Calibration(), Calibration(), torch.Generator().manual_seed(0)
    for _ in range(400):
        proud.observe([0.99] * 4, [1] * 4, torch.rand(4, generator=rng).numpy() < 0.02)
    assert float(proud(torch.tensor([0.99]), torch.tensor([1]))) < 0.045
    for _ in range(100):
        lesson.observe([0.3] * 10, [1] * 10, [True] * 9 + [False])
    for _ in range(60):
        lesson.observe([0.9] * 10, [1] * 10, [True] * 10)
    lesson.observe([0.3] * 40, [1] * 40, [False] * 40)
    assert float(lesson(torch.tensor([0.3]), torch.tensor([1]))) > 0.6


def test_a_bin_is_never_forgotten_altogether():
    calibration = Calibration()
    for _ in range(1000):
        calibration.observe([0.9] * 1000, [1] * 1000, [True] * 1000)
    assert float(calibration(torch.tensor([0.3]), torch.tensor([1]))) == pytest.approx(0.3, abs=0.05)


def test_a_token_that_the_draft_thinks_impossible_says_no_more_than_an_unlikely_one():
    fitted, logits = DraftTemperature(0.6), torch.zeros(50)
    logits[0], logits[1] = 3.0, -1000.0
    fitted.observe([logits], [1])
    assert fitted.inverse == pytest.approx(1 / 0.6 - DEVIATION / INFORMATION, rel=0.02)


@pytest.mark.parametrize(("true", "first"), [(0.5, 0.6), (0.6, 1.0), (1.2, 0.6)])
def test_the_temperature_that_says_best_what_the_target_takes(true, first):
    fitted, generator = DraftTemperature(first), torch.Generator().manual_seed(0)
    for _ in range(600):
        logits = 2 * torch.randn(2, 50, generator=generator)
        token = torch.multinomial((logits / true).softmax(-1), 1, generator=generator)[:, 0]
        fitted.observe([*logits], token.tolist())
    assert fitted.temperature == pytest.approx(true, rel=0.1)


def test_a_useless_draft_is_flattened_and_a_perfect_one_sharpened_within_bounds():
    useless, perfect, generator = DraftTemperature(0.6), DraftTemperature(0.6), torch.Generator().manual_seed(0)
    for _ in range(2000):
        logits = 5 * torch.randn(1, 50, generator=generator)
        useless.observe([*logits], torch.randint(50, (1,), generator=generator).tolist())
        perfect.observe([*logits], logits.argmax(-1).tolist())
    assert useless.temperature == 2.0
    assert 0.2 <= perfect.temperature < 0.4


@pytest.mark.parametrize("requests", [ROWS + 1, 2 * ROWS, 3 * ROWS + 2])
def test_of_a_large_batch_some_count_and_all_in_turn(requests, monkeypatch):
    fitted, counted, measured = DraftTemperature(0.6), set(), DraftTemperature.measured

    def spied(self, logits, *rest):
        assert len(logits) <= ROWS
        counted.update(logits.argmax(-1).tolist())
        return measured(self, logits, *rest)

    monkeypatch.setattr(DraftTemperature, "measured", spied)
    for _ in range(requests):
        fitted.observe([*torch.eye(requests)], [0] * requests)
    assert counted == set(range(requests))


def test_no_tokens_teach_nothing():
    fitted = DraftTemperature(0.6)
    fitted.observe([], [])
    assert fitted.temperature == 0.6


def test_banned_tokens_change_nothing():
    with_them, without, generator = DraftTemperature(0.6), DraftTemperature(0.6), torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = torch.randn(3, 20, generator=generator)
        with_them.observe([*torch.nn.functional.pad(logits, (0, 5), value=-torch.inf)], logits.argmax(-1).tolist())
        without.observe([*logits], logits.argmax(-1).tolist())
    assert with_them.temperature == pytest.approx(without.temperature)


def test_tokens_that_a_draft_does_not_know_teach_nothing():
    """No temperature explains what a reduced vocabulary lacks."""
    fitted, generator = DraftTemperature(1.0), torch.Generator().manual_seed(0)
    for _ in range(600):
        logits = 2 * torch.randn(2, 50, generator=generator)
        token = torch.multinomial((logits / 0.5).softmax(-1), 1, generator=generator)[:, 0]
        fitted.observe([*logits.index_fill(1, torch.arange(0, 50, 4), -torch.inf)], token.tolist())
    assert fitted.temperature == pytest.approx(0.5, rel=0.1)


def test_tokens_of_others_teach_nothing():
    some, alone, generator = DraftTemperature(0.6), DraftTemperature(0.6), torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randn(3, 20, generator=generator)
        token, among = logits.argmax(-1), torch.tensor([True, False, True])
        some.learn(*some.measured(logits, token.where(among, -1), among).tolist())
        alone.learn(*alone.measured(logits[among], token[among], torch.tensor([True, True])).tolist())
    assert some.temperature == pytest.approx(alone.temperature)
    assert alone.temperature < 0.6


def test_a_look_up_is_not_believed_as_the_draft_is():
    calibration, value = Calibration(), [0.3] * 4
    assert calibration.chances(value[:2], [2, -2]).tolist() == pytest.approx([0.3, 0.3], rel=0.1)
    for _ in range(4):
        calibration.observe(value, [-2] * 4, [False] * 4)
    drafted, found, deeper, beyond = calibration.chances(value, [2, -2, -3, -40]).tolist()
    assert found < 0.2, "it lies between two bins"
    assert drafted == pytest.approx(0.3, rel=0.1)
    assert deeper == beyond == pytest.approx(0.3, rel=0.1)
    calibration.observe(value, [40] * 4, [True] * 4)
    assert calibration.chances(value[:3], [16, -16, -2]).tolist() == pytest.approx([0.48, 0.3, found], rel=0.2)
