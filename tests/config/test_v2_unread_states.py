"""What a resting head reads later on Model Runner V2 is what it would have read at once; bounds stay on the device."""

import numpy as np
import pytest
import torch

from tests.pure.test_no_host_sync import NoHostSync
from vllm_adaptive_tree.engine.v2.unread_states import LONGEST, Late, UnreadStates

REQUESTS, POSITIONS = 4, 8


class Texts:
    """Requests of which a step reads so many tokens more. The target's state at a position is known by both numbers."""

    def __init__(self) -> None:
        self.unread = UnreadStates(REQUESTS, torch.zeros(1, 2), rows=REQUESTS * POSITIONS)
        self.computed = torch.tensor([10, 20, 30, 40], dtype=torch.int32)
        self.text = torch.arange(100) + 100 * torch.arange(REQUESTS)[:, None]

    def step(self, lengths: dict[int, int], columns: int) -> None:
        """Each of these requests accepts so many tokens; its rows are in a random order, among others."""
        requests, sampled = np.array([*lengths]), torch.tensor([*lengths.values()])
        row = torch.randperm(len(lengths) * columns).view(len(lengths), columns)
        states = torch.full((row.numel(), 2), torch.nan)
        for place, (request, length) in enumerate(lengths.items()):
            for column in range(length):
                states[row[place, column]] = torch.tensor([request, int(self.computed[request]) + column])
        index = torch.from_numpy(requests)
        self.computed[index] += sampled.int()
        with NoHostSync():
            self.unread.keep(requests, index, self.computed[index], sampled, row, states)

    def take(self, *requests: int) -> Late:
        """What waits of these, or of all."""
        with NoHostSync():
            return self.unread.take(np.array(requests or range(REQUESTS)), self.computed, self.text)


def check(late: Late, expected: dict[int, range]) -> None:
    start = late.row_start.tolist()
    assert late.request.tolist() == [*expected]
    assert late.end.tolist() == [positions.stop for positions in expected.values()]
    for place, (request, positions) in enumerate(expected.items()):
        rows = slice(start[place], start[place + 1])
        assert late.place[rows].tolist() == [*positions]
        assert late.tokens[rows].tolist() == [100 * request + position + 1 for position in positions]
        assert late.states[rows].tolist() == [[request, position] for position in positions]
    assert start[-1] <= len(late.place) == late.sizes.sum()


def test_it_waits_for_the_head() -> None:
    texts = Texts()
    texts.step({1: 1, 0: 3}, 3)
    texts.step({0: 1}, 1)
    texts.step({3: 2, 0: 1}, 2)
    check(texts.take(3, 2), {3: range(40, 42)})
    check(texts.take(), {0: range(10, 15), 1: range(20, 21)})
    assert not texts.unread.count.any()
    texts.step({0: 1, 2: 1}, 1)
    check(texts.take(), {0: range(15, 16), 2: range(30, 31)})


def test_a_ring_of_positions() -> None:
    texts = Texts()
    for _ in range(5):
        for _ in range(POSITIONS):
            assert texts.unread.fits(np.array([2, 1]), 1)
            texts.step({2: 1}, 1)
        assert not texts.unread.fits(np.array([1, 2]), 1)
        assert texts.unread.fits(np.array([1]), POSITIONS)
        at = int(texts.computed[2])
        check(texts.take(), {2: range(at - POSITIONS, at)})


@pytest.mark.parametrize("columns", [3, 4])
def test_the_host_counts_rows_that_were_rejected_too(columns: int) -> None:
    texts = Texts()
    texts.step({1: 2, 2: 1}, columns)
    texts.step({1: 1}, columns)
    assert texts.unread.count.tolist() == [0, 2 * columns, columns, 0]
    late = texts.take()
    check(late, {1: range(20, 23), 2: range(30, 31)})
    assert len(late.place) == 3 * columns


def test_how_much_waits() -> None:
    """As much as one step can read, and as fits 256 MiB."""
    assert UnreadStates(4, torch.zeros(1, 2), rows=8192).positions == LONGEST
    assert UnreadStates(256, torch.zeros(1, 2), rows=8192).positions == 32
    wide = torch.zeros(1, 1 << 20, device="meta")  # 4 MiB a row
    assert UnreadStates(8, wide, rows=8192).positions == 8
    assert UnreadStates(100, wide, rows=8192).positions == 1
