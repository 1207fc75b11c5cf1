"""Cost curves: what a forward takes by its rows."""

import json
import math
import random

import numpy as np
import pytest
import torch

from tests.pure.budget import PLATEAUS, curve
from vllm_adaptive_tree.budget import Costs, Curve, allocate
from vllm_adaptive_tree.budget.cost import profiled_rows


def random_curve(generator: random.Random) -> Curve:
    rows = sorted(generator.sample(range(1, 40), 6))
    return curve(*((x, generator.uniform(0.1, 3)) for x in rows))


def test_a_curve_goes_through_its_points_and_never_falls():
    made = curve((1, 2.0), (4, 1.0), (8, 5.0))
    assert made.at([1, 4, 6, 8, 10, 0]).tolist() == pytest.approx([1, 1, 3, 5, 7, 1])


def test_a_last_point_that_came_out_too_low_makes_no_rows_free():
    made = curve((1, 1.0), (101, 3.0), (201, 3.0))
    assert made.cost(1201) == pytest.approx(3.0 + 1000 * 2 / 200)
    steep = curve((1, 1.0), (101, 1.0), (201, 3.0))
    assert steep.cost(301) == pytest.approx(5.0), "the last slope"


def test_the_last_point_follows_forwards_far_beyond_it_by_little():
    near, far = curve((1, 1.0), (100, 2.0)), curve((1, 1.0), (100, 2.0))
    near.observe(110, near.cost(110) / 1.5)
    far.observe(40000, far.cost(40000) / 1.5)
    assert near.cost(100) < 1.4
    assert far.cost(100) > 1.95


@pytest.mark.parametrize("seed", range(20))
def test_no_row_counts_for_more_than_a_later_one(seed):
    made = random_curve(random.Random(seed))
    for rows in (3, 17, 30):
        made.observe(rows, 0.5)
    assert (np.diff(made.at(range(60))) >= -1e-12).all()


@pytest.mark.parametrize("seed", range(5))
def test_one_number_of_rows_costs_what_it_costs_among_others(seed):
    made = random_curve(random.Random(seed))
    assert [made.cost(rows) for rows in range(60)] == pytest.approx(made.at(range(60)).tolist())


def test_one_slow_measurement_does_not_make_more_rows_dear():
    made, spoilt = curve((1, 1.0), (4, 1.1), (8, 1.5)), curve((1, 1.0), (2, 1.6), (4, 1.1), (8, 1.5))
    assert spoilt.at([4, 6, 8]).tolist() == pytest.approx(made.at([4, 6, 8]).tolist())
    assert spoilt.cost(2) == pytest.approx(1.1)


def test_a_curve_follows_the_measurements():
    made = curve((1, 1.0), (11, 2.0), (21, 3.0))
    for _ in range(400):
        made.observe(6, 3.0)
    assert made.cost(6) == pytest.approx(3.0, rel=1e-2)
    assert made.cost(1) == pytest.approx(2.0, rel=0.02), "both neighbours moved alike"


def test_points_that_were_not_seen_are_corrected_as_their_neighbours_are():
    """The profile was three times too fast at few rows, and right at many."""
    made = curve((1, 1.0), (2, 1.0), (4, 1.0), (8, 2.0), (64, 16.0))
    for _ in range(50):
        made.observe(1, 3.0)
        made.observe(64, 16.0)
    assert [made.cost(1), made.cost(64)] == pytest.approx([3.0, 16.0], rel=0.02)
    assert 2 < made.cost(8) < 6, "in between"
    assert made.cost(2) >= made.cost(1), "nobody has seen more rows take less"
    assert made.knows(1)
    assert made.knows(63)
    assert not made.knows(3)


def test_a_point_that_was_seen_keeps_to_itself():
    made = curve((1, 1.0), (4, 1.0), (16, 2.0))
    for _ in range(20):
        made.observe(1, 1.0)
    for _ in range(50):
        made.observe(16, 4.0)
    assert made.cost(1) == pytest.approx(1.0)
    assert made.cost(16) == pytest.approx(4.0, rel=0.02)


def test_a_machine_that_warms_up_warms_up_for_all_rows():
    """Among them those that only slow times have seen; what scatters moves none of them."""
    made = curve((1, 1.0), (4, 1.2), (16, 2.0))
    for _ in range(20):
        for rows, seconds in ((1, 1.2), (4, 1.44), (16, 2.4)):
            made.observe(rows, seconds)
    for _ in range(200):
        made.observe(1, 1.0)
    assert made.cost(4) == pytest.approx(1.2, rel=0.05)
    assert made.cost(16) == pytest.approx(2.0, rel=0.05)
    known = made.cost(16)
    for scatter in np.random.default_rng(0).normal(1, 0.1, 3000):
        made.observe(1, scatter)
    assert made.cost(16) == pytest.approx(known, rel=0.05)


def test_one_stalled_step_moves_a_curve_by_little():
    made = curve((1, 1.0), (11, 2.0))
    for _ in range(40):
        made.observe(1, 1.0)
        made.observe(11, 2.0)
    made.observe(1, 1e9)
    assert 1 < made.cost(1) < 1.05
    made.observe(11, 1e-9)
    assert 1.9 < made.cost(11) < 2.0


def test_a_machine_that_has_changed_is_soon_believed():
    made = curve((1, 1.0), (11, 2.0))
    for _ in range(400):
        made.observe(1, 1.0)
    for _ in range(12):
        made.observe(1, 4.0)
    assert made.cost(1) == pytest.approx(4.0, rel=0.1)


def test_forwards_in_graphs_cost_what_the_next_size_does():
    measured = curve((1, 1.0), (8, 1.7), (16, 2.5), (17, 4.0), (32, 7.0))
    made = Costs(measured, measured).in_graphs([1, 8, 16]).verify
    rows = [1, 2, 8, 9, 15.5, 16, 17, 20]
    padded = [1, 8, 8, 16, 16, 16, 17, 20]
    assert made.padded(rows).tolist() == padded
    assert made.at(rows).tolist() == measured.at(padded).tolist() == [made.cost(count) for count in rows]
    made.observe(9, 5.0)
    assert made.knows(12)
    assert made.cost(9) == made.cost(16) > 2.5


def test_a_step_verifies_up_to_the_size_that_it_pays_for():
    sizes = [1, 2, 4, *range(8, 33, 8)]
    measured = curve(*((rows, 1 + rows / 20) for rows in range(1, 40)))
    values = torch.tensor([[0.9, 0.6, 0.2, *[0.15 * 0.8**place for place in range(20)]]])
    alone, padded = (
        int(allocate(values, verify=one, price=0.9).sum())
        for one in (measured, Costs(measured, measured).in_graphs(sizes).verify)
    )
    assert 1 + alone not in sizes
    assert 1 + padded in sizes


@pytest.mark.parametrize("most", [1, 2, 5, 17, 40, 256])
def test_a_profile_looks_behind_each_tile(most):
    rows = profiled_rows(most)
    assert rows == sorted(set(rows)), "a curve wants them rising"
    assert (rows[0], rows[-1]) == (1, most)
    assert {16, 17, 32, 33, 64, 65}.intersection(range(most + 1)) <= set(rows)


def test_a_curve_is_written_and_read():
    made = Curve.from_json(json.loads(json.dumps(PLATEAUS.to_json())))
    assert (made.rows == PLATEAUS.rows).all()
    assert (made.seconds == PLATEAUS.seconds).all()


@pytest.mark.parametrize(
    "data",
    [
        {"rows": [1, 2]},
        {"rows": [1, 2], "seconds": [1]},
        {"rows": [2, 1], "seconds": [1, 2]},
        {"rows": [1], "seconds": [1]},
        {"rows": [1, 2], "seconds": [0, 1]},
        {"rows": [1, 2], "seconds": ["fast", 1]},
        7,
    ],
)
def test_what_is_no_curve(data):
    with pytest.raises(ValueError, match="a curve"):
        Curve.from_json(data)


def test_costs_as_json():
    written = Costs(curve((1, 1.0), (4, 2.0)), curve((1, 0.1), (8, 0.2)), context=1e-6)
    assert str(Costs.from_json(json.loads(json.dumps(written.to_json())))) == str(written)
    good = written.to_json()
    for wrong in ({}, [], None, {**good, "context": -1}, {**good, "context": math.nan}, {**good, "draft": None}):
        with pytest.raises(ValueError, match="number|missing|curve"):
            Costs.from_json(wrong)
