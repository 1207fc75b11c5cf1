"""Coverage of a paged cache by a draft, block by block."""

import numpy as np
import pytest

from vllm_adaptive_tree.engine.common.coverage import Coverage

FIRST, SECOND = np.array([3, 1, 4, 0]), np.array([3, 1, 2, 5])  # two blocks in common


def test_it_reaches_as_far_as_it_read():
    coverage = Coverage(6, 4)
    assert coverage.reach(FIRST, 9) == 0
    coverage.read(FIRST, 0, 6)
    assert [coverage.reach(FIRST, end) for end in (3, 6, 9)] == [3, 6, 6]
    coverage.read(FIRST, 6, 11)
    assert coverage.reach(FIRST, 16) == 11


def test_reading_again_forgets_what_stood_behind():
    coverage = Coverage(6, 4)
    coverage.read(FIRST, 0, 11)
    coverage.read(FIRST, 6, 9)
    assert coverage.reach(FIRST, 16) == 9


@pytest.mark.parametrize(("start", "end"), [(4, 9), (5, 6), (7, 12)])
def test_a_gap_stops_it_until_it_is_read(start, end):
    coverage = Coverage(6, 4)
    coverage.read(FIRST, 0, start)
    coverage.skipped(FIRST, start, end)
    assert coverage.reach(FIRST, end) == start
    coverage.read(FIRST, start, end)
    assert coverage.reach(FIRST, end) == end


def test_a_skipped_token_inside_a_covered_block_uncovers_it():
    coverage = Coverage(6, 4)
    coverage.read(FIRST, 0, 8)
    coverage.skipped(FIRST, 2, 3)
    assert coverage.reach(FIRST, 8) == 2


def test_a_second_rest_in_a_block_leaves_the_gap_of_the_first():
    coverage = Coverage(6, 4)
    coverage.read(FIRST, 0, 5)
    coverage.skipped(FIRST, 5, 6)
    coverage.skipped(FIRST, 6, 7)
    assert coverage.reach(FIRST, 8) == 5


def test_another_request_finds_what_was_read_in_the_blocks_that_it_shares():
    coverage = Coverage(6, 4)
    coverage.read(FIRST, 0, 12)
    assert coverage.reach(SECOND, 12) == 8
    coverage.skipped(SECOND, 8, 12)  # a block that changed hands
    assert coverage.reach(FIRST, 12) == 12
    coverage.skipped(np.array([4]), 0, 4)
    assert coverage.reach(FIRST, 12) == 8
