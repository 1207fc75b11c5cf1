"""Medians, ratios and their intervals."""

import numpy as np
import pytest

from vllm_adaptive_tree.bench import statistics


def test_median_of_a_known_sample():
    found = statistics.median(dict(enumerate([10.0, 12.0, 11.0, 30.0, 9.0])))
    assert found is not None
    assert (found.median, found.rounds) == (11.0, 5)
    assert 9 <= found.low < 11 < found.high <= 30
    assert found == statistics.median(dict(enumerate([10.0, 12.0, 11.0, 30.0, 9.0]))), "the seed is fixed"


def test_the_interval_covers_the_median_nine_times_in_ten():
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        found = statistics.median(dict(enumerate(generator.lognormal(0, 0.2, size=15))))
        assert found is not None
        hits += found.low <= 1.0 <= found.high
    assert 0.82 <= hits / 200 <= 0.98


def test_a_ratio_is_of_rounds_that_ran_side_by_side():
    base = {number: 100.0 * drift for number, drift in enumerate([1, 0.2, 3, 0.5, 7, 2], 1)}
    ours = {number: 1.5 * speed for number, speed in base.items()}
    found = statistics.ratio(ours, base)
    assert found is not None
    assert [round(value, 9) for value in found[:3]] == [1.5, 1.5, 1.5], "the drift of the machine cancels"
    assert statistics.ratio(ours, {7: 1.0, **{n: base[n] for n in (1, 2, 3, 4)}}) is None, "four shared rounds"


@pytest.mark.parametrize("few", range(5))
def test_no_ratio_from_fewer_than_five_rounds(few):
    values = {number: 1.0 + number for number in range(few)}
    enough = {number: 1.0 + number for number in range(9)}
    assert statistics.ratio(values, enough) is None
    assert statistics.ratio_through(values, enough, enough, enough) is None
    assert statistics.ratio_through(enough, enough, values, enough) is None


def test_a_ratio_through_a_third():
    base, later = dict.fromkeys(range(5), 10.0), dict.fromkeys(range(5), 40.0)  # the machine became faster
    found = statistics.ratio_through(dict.fromkeys(range(5), 20.0), base, dict.fromkeys(range(5), 100.0), later)
    assert found is not None
    assert found[:3] == (0.8, 0.8, 0.8)


def test_totals_are_of_rounds_one_after_the_other():
    base = dict(enumerate([10.0, 10.0, 20.0, 20.0, 10.0]))
    ours = {**base, 2: 80.0, 3: 10.0}
    times = {name: sum(1 / speed for speed in values.values()) for name, values in (("base", base), ("ours", ours))}
    found, speed = statistics.total_ratio(ours, base), statistics.total(ours)
    assert found is not None
    assert speed is not None
    assert found.median == pytest.approx(times["base"] / times["ours"])
    assert speed.median == pytest.approx(5 / times["ours"])
    assert found.low < found.median < found.high
    median = statistics.ratio(ours, base)
    assert median is not None
    assert median.median == 1.0, "the median hides both"
    assert statistics.total_ratio(ours, {0: 1.0, 1: 1.0}) is None
    assert statistics.total({}) is None
    few = statistics.total({1: 2.0, 2: 4.0})
    assert few is not None
    assert few[:3] == (8 / 3, 2.0, 4.0)
