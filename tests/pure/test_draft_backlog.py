"""Backlog of a draft at rest, by request and by block."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_adaptive_tree.engine.common.coverage import Coverage
from vllm_adaptive_tree.engine.common.loads import first_loaded, note_loaded, num_loaded
from vllm_adaptive_tree.engine.v2.draft_backlog import DraftBacklog, Gap

SIZE = 4
LOADS = [
    (6, 0, 10, 6),
    (11, 0, 10, 10),  # a whole prompt, whose last token is computed anew
    (6, 0, 4, 4),  # a load that failed
    (0, 0, 8, 0),
    (0, 1, 8, 8),  # a preemption before the first output
    (None, 1, 8, 8),
]
"""Loaded when it came, preemptions, computed, loaded."""


def backlog(slack: int = 0, limit: int = 64) -> DraftBacklog:
    coverage = Coverage(16, SIZE)
    coverage.renew(slice(None))
    return DraftBacklog(coverage, 4, slack, limit)


def numbers(*values: int) -> np.ndarray:
    return np.array(values)


def test_nothing_is_missing_until_something_is_skipped():
    it = backlog()
    it.added(0, [3, 1], 0)
    it.extended(0, [4])
    assert it.gaps(numbers(0), numbers(9)) == []


def test_steps_in_a_row_are_one_gap_and_reading_closes_it():
    it = backlog()
    it.added(2, [3, 1, 4], 0)
    it.added(1, [5], 0)
    for computed in (3, 4, 5):
        it.skipped(numbers(2), numbers(computed), numbers(1))
    assert it.gaps(numbers(1, 2), numbers(2, 6)) == [Gap(1, 3, 6)]
    it.read(2, 3, 6, whole=True)
    assert it.gaps(numbers(1, 2), numbers(2, 9)) == []


def test_a_part_leaves_the_rest():
    it = backlog()
    it.added(0, [3, 1, 4], 0)
    it.skipped(numbers(0), numbers(1), numbers(9))
    assert it.gaps(numbers(0), numbers(10)) == [Gap(0, 1, 10)]
    it.read(0, 1, 6, whole=False)
    it.skipped(numbers(0), numbers(10), numbers(1))
    assert it.gaps(numbers(0), numbers(11)) == [Gap(0, 6, 11)]


def test_a_gap_begins_where_the_host_is_sure():
    it = backlog(slack=3)
    it.added(0, [3, 1, 4], 0)
    it.skipped(numbers(0), numbers(8), numbers(1))
    it.skipped(numbers(0), numbers(7), numbers(1))  # of two nodes less than it had thought
    assert it.gaps(numbers(0), numbers(8)) == [Gap(0, 4, 8)]


def test_what_the_draft_cannot_read_is_no_gap():
    it = backlog(limit=8)
    it.added(0, [3, 1, 4], 0)
    it.skipped(numbers(0), numbers(6), numbers(4))
    assert it.gaps(numbers(0), numbers(10)) == [Gap(0, 6, 8)]
    it.read(0, 6, 8, whole=True)
    it.skipped(numbers(0), numbers(10), numbers(1))
    assert it.gaps(numbers(0), numbers(11)) == []


def test_a_later_request_finds_the_gap_in_the_blocks_that_it_shares():
    it = backlog()
    it.added(0, [3, 1, 4], 0)
    it.skipped(numbers(0), numbers(2), numbers(8))
    it.added(1, [3, 1, 7], 8)  # while the first one runs
    assert it.gaps(numbers(1), numbers(8)) == [Gap(0, 2, 8)]
    it.read(1, 2, 8, whole=True)
    it.removed(0)
    it.added(2, [3, 1, 4, 9], 12)  # and after it has ended
    assert it.gaps(numbers(2), numbers(12)) == [Gap(0, 8, 12)]


def test_blocks_that_change_hands_begin_anew():
    it = backlog()
    it.added(0, [3, 1], 0)
    it.skipped(numbers(0), numbers(0), numbers(7))
    it.removed(0)
    it.added(0, [1, 3], 0)
    assert it.gaps(numbers(0), numbers(7)) == []
    it.extended(0, [2])
    assert it.gaps(numbers(0), numbers(11)) == []


def test_a_copied_block_misses_what_its_source_does():
    it = backlog()
    it.added(0, [3], 0)
    it.skipped(numbers(0), numbers(1), numbers(3))
    it.copied(3, 5)
    it.added(1, [5, 6], 2)
    assert it.gaps(numbers(1), numbers(2)) == [Gap(0, 1, 2)]


def test_what_a_connector_brings_is_read_anew():
    it = backlog()
    it.added(0, [3, 1, 4], 10, 6)
    assert it.gaps(numbers(0), numbers(10)) == [Gap(0, 4, 10)]
    it.read(0, 4, 10, whole=True)
    it.added(1, [3, 1, 5], 8)  # a prefix hit on what has been read
    assert it.gaps(numbers(1), numbers(8)) == []


@pytest.mark.parametrize(("of_first", "preemptions", "computed", "loaded"), LOADS)
def test_tokens_that_may_be_loaded(of_first: int | None, preemptions: int, computed: int, loaded: int):
    stats = None if of_first is None else SimpleNamespace(num_external_cached_tokens=of_first)
    new = SimpleNamespace(num_computed_tokens=computed)
    note_loaded(new, SimpleNamespace(prefill_stats=stats, num_preemptions=preemptions))
    assert num_loaded(new) == loaded


def test_what_may_be_loaded_of_a_step():
    """A request that comes back after a preemption may have loaded all."""
    new = [SimpleNamespace(req_id="a", num_computed_tokens=10), SimpleNamespace(req_id="b", num_computed_tokens=3)]
    came = SimpleNamespace(prefill_stats=SimpleNamespace(num_external_cached_tokens=6), num_preemptions=0)
    note_loaded(new[0], came)
    step = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"c"}))
    assert first_loaded(step) == {"a": 4, "b": 3, "c": 0}
