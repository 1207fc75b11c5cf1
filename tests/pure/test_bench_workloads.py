"""The prompts of a round."""

from itertools import islice

import pytest

from vllm_adaptive_tree.bench import workloads
from vllm_adaptive_tree.bench.plan import Cell


@pytest.mark.parametrize(("concurrency", "count"), [(1, 4), (2, 6), (3, 9), (32, 64), (100, 100)])
def test_every_round_has_prompts_of_its_own(concurrency, count):
    first, second = (workloads.prompt_indices(Cell("offline", concurrency), number, 200) for number in (0, 1))
    assert len(first) == len(second) == count
    assert len({*first, *second}) == 2 * count


def test_a_cell_may_say_how_many_requests():
    cell = Cell("offline", 8, requests=10)
    rounds = [workloads.prompt_indices(cell, number, 25) for number in range(3)]
    assert rounds == [[*range(10)], [*range(10, 20)], [*range(20, 25), *range(5)]], "then the prompts start over"


def test_a_phase_of_a_bursty_load_begins_with_its_own_prompts():
    prompts = [str(number) for number in range(400)]
    phases = [list(islice(workloads.prompts_of_phase(prompts, 32, phase), 450)) for phase in (0, 1, 5)]
    assert [one[0] for one in phases] == ["0", "96", "80"]
    assert all(one[:50] == one[400:] for one in phases)


def test_standard_prompts():
    found = workloads.standard_library()
    assert len(found) >= 100
    assert len(set(found)) == len(found)
    assert all(prompt.strip() for prompt in found)


def test_answers_of_a_mixed_load():
    assert [workloads.mixed_length(prompt, 32) for prompt in range(6)] == [16, 24, 32, 40, 48, 16]
    assert workloads.mixed_length(0, 1) == 1
