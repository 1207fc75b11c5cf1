"""What a head reads late is what it would have read at once, and only what a tree needs."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.engine.v1.catch_up import CatchUp
from vllm_adaptive_tree.engine.v1.host_draft import has_gap
from vllm_adaptive_tree.engine.v1.unread_states import Unread, UnreadStates

BLOCK = 8
WIDTH = 2 * 8  # bytes of a position's states below


class Requests:
    """A cache whose slots hold the position that was read there, plus 1000 times its owner; 0: nothing."""

    def __init__(self, most: int = 1 << 20, tokens: int = 1 << 20, blocks: int = 12):
        self.cache = torch.zeros(blocks * BLOCK)
        self.unread = UnreadStates(self.read, tokens, most=most)
        self.tokens, self.reads = tokens, 0

    def read(self, unread: Unread) -> None:
        assert 0 < len(unread.tokens) <= self.tokens
        assert unread.tokens == [1 + int(state) for state in unread.states[:, 0]], "the token after each position"
        assert (unread.states[:, 0] % 1000 == unread.positions).all()
        assert (unread.states[:, 1] == -unread.states[:, 0]).all()
        self.cache[unread.slots] = unread.states[:, 0].float()
        self.reads += len(unread.tokens)

    def step(self, *new: tuple[int, int, int], drafting: bool, table: list[list[int]]) -> list[CatchUp]:
        """A step of (row, start, count), the rows' blocks in `table`; those that draft write the cache themselves."""
        pending, states, first = [], list[int](), 0
        for row, start, count in new:
            mine = [1000 * owner_of(table[row]) + start + i for i in range(count)]
            rows = range(first, first + count)
            pending.append(CatchUp(row, start, [1 + state for state in mine], start + count, rows))
            states += mine
            first += count
        flat = torch.tensor(states, dtype=torch.float64)[:, None]
        items = self.unread.to_read(pending, [flat, -flat], np.array(table), BLOCK, drafting=drafting)
        for item in items:
            places = torch.arange(item.start, item.start + len(item.tokens))
            self.cache[slots(table[item.row], places)] = (1000 * owner_of(table[item.row]) + places).float()
        return items

    def seen(self, table: list[int], end: int) -> list[int]:
        return [int(place) for place in self.cache[slots(table, torch.arange(end))]]


def slots(table: list[int], places: Tensor) -> Tensor:
    return torch.tensor(table)[places // BLOCK] * BLOCK + places % BLOCK


def owner_of(table: list[int]) -> int:
    return table[-1]  # a block that the request shares with none


def positions(table: list[int], end: int) -> list[int]:
    return [1000 * owner_of(table) + place for place in range(end)]


A, B = [1, 2, 3], [4, 5, 6]


def test_it_waits_until_a_tree_needs_it() -> None:
    requests = Requests()
    table = [A, B]
    assert requests.step((0, 0, 10), (1, 0, 3), drafting=False, table=table) == []
    assert requests.step((0, 10, 1), drafting=False, table=table) == []
    assert not requests.reads
    (item,) = requests.step((0, 11, 2), drafting=True, table=table)
    assert (item.start, item.late, requests.reads) == (11, 11, 11), "one request's alone"
    assert requests.seen(A, 13) == positions(A, 13)
    (item,) = requests.step((0, 13, 1), drafting=True, table=table)
    assert not item.late
    assert not requests.cache[4 * BLOCK :].any()


def test_a_prompt_waits_for_its_root() -> None:
    requests = Requests()
    prompt = CatchUp(0, 0, [1 + 3000 + i for i in range(5)], None, range(5))
    states = torch.arange(3000.0, 3005.0)[:, None].double()
    assert requests.unread.to_read([prompt], [states, -states], np.array([A]), BLOCK, drafting=True) == []
    requests.step((0, 5, 4), drafting=True, table=[A])
    assert requests.seen(A, 9) == positions(A, 9)


def test_a_prefix_hit_reads_what_another_left() -> None:
    requests = Requests()
    requests.step((0, 0, 2 * BLOCK), drafting=False, table=[A])
    other = [1, 2, 6]
    (item,) = requests.step((0, 2 * BLOCK, 3), drafting=True, table=[other])
    assert item.late == 2 * BLOCK
    assert requests.seen(other, 2 * BLOCK) == positions(A, 2 * BLOCK)
    (item,) = requests.step((0, 2 * BLOCK, 3), drafting=True, table=[A])
    assert not item.late, "once"


def test_a_prefix_hit_on_what_another_leaves_in_the_same_step() -> None:
    requests = Requests()
    prompt = CatchUp(1, 0, [1 + 3000 + i for i in range(BLOCK)], None, range(BLOCK))
    hit = CatchUp(0, BLOCK, [1 + 9000 + BLOCK], BLOCK, [BLOCK])
    states = torch.tensor([*range(3000, 3000 + BLOCK), 9000 + BLOCK], dtype=torch.float64)[:, None]
    table = [[1, 2, 9], A]
    (item,) = requests.unread.to_read([hit, prompt], [states, -states], np.array(table), BLOCK, drafting=True)
    assert item.late == BLOCK
    assert requests.seen(table[0], BLOCK) == positions(A, BLOCK)


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("count", [3, BLOCK + 2])
def test_a_block_that_changes_hands_forgets(drafting: bool, count: int) -> None:
    requests = Requests()
    requests.step((0, 0, 5), drafting=False, table=[A])
    new = [1, 2, 7]
    requests.step((0, 0, count), drafting=drafting, table=[new])
    requests.step((0, count, 1), drafting=True, table=[new])
    assert requests.seen(new, 1 + count) == positions(new, 1 + count)
    assert requests.unread.num_free == len(requests.unread.free)


def test_requests_that_go_back() -> None:
    requests = Requests()
    requests.step((0, 0, 12), drafting=False, table=[A])
    requests.step((0, 10, 1), drafting=False, table=[A])
    (item,) = requests.step((0, 11, 1), drafting=True, table=[A])
    assert item.late == 11
    requests.step((0, 12, 3), drafting=False, table=[A])
    (item,) = requests.step((0, 13, 1), drafting=True, table=[A])
    assert item.late == 1
    assert requests.seen(A, 14) == positions(A, 14)
    assert requests.unread.num_free == len(requests.unread.free)


def test_a_gap_is_not_bridged() -> None:
    requests = Requests()
    requests.step((0, 0, 2), drafting=False, table=[A])
    requests.step((0, 4, 2), drafting=False, table=[A])
    (item,) = requests.step((0, 6, 1), drafting=True, table=[A])
    assert item.late == 2


@pytest.mark.parametrize("rows", [1, 6, 20])
@pytest.mark.parametrize("tokens", [6, 100])  # a step has no more than 6
def test_little_room(rows: int, tokens: int) -> None:
    """Random steps: whatever is read for want of room, a tree sees all of its request."""
    random, requests = np.random.default_rng(rows), Requests(rows * WIDTH, tokens)
    table, ends = [A, B], [0, 0]
    for _ in range(60):
        counts = random.integers(1, 4, 2).tolist()
        if max(map(sum, zip(ends, counts, strict=True))) > 3 * BLOCK:
            ends = [0, 0]  # the blocks change hands
            table = [[*blocks[:2], 7 + blocks[0] % 2] if blocks[2] < 7 else [*blocks[:2], owner] for blocks, owner in
                     zip(table, (3, 6), strict=True)]  # fmt: skip
        drafting = bool(random.random() < 0.3)
        new = [(row, end, count) for row, (end, count) in enumerate(zip(ends, counts, strict=True))]
        requests.step(*new, drafting=drafting, table=table)
        ends = [end + count for end, count in zip(ends, counts, strict=True)]
        if drafting:
            for blocks, end in zip(table, ends, strict=True):
                assert requests.seen(blocks, end) == positions(blocks, end)
        waiting = sum(len(one.rows) for one in requests.unread.waiting.values())
        assert waiting + requests.unread.num_free == rows
    assert requests.reads


def test_times_of_a_step_with_a_gap_are_not_those_of_others() -> None:
    """What waited at rest is a gap, as is what a model skipped; the chunks of a prompt are not."""
    new = CatchUp(0, 20, [1, 2], 22, [0, 1])
    assert not has_gap(new, new, prompt=10)
    assert has_gap(new._replace(late=3), new, prompt=10)
    assert not has_gap(new._replace(late=20), new, prompt=21), "until the prompt was whole"
    assert has_gap(new._replace(start=18, tokens=[3, 4, 1, 2]), new, prompt=10)
    assert has_gap(new._replace(tokens=[1], root=None), new, prompt=10), "no room for all"
