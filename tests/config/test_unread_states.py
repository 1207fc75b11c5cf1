"""What a resting head reads later is what it would have read at once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.engine.v1.catch_up import CatchUp
from vllm_adaptive_tree.engine.v1.head_drafter import HeadDrafter
from vllm_adaptive_tree.engine.v1.unread_states import LONGEST, UnreadStates, read_states

BLOCK, NAMES = 128, ["a", "b"]


def states_of(items: list[CatchUp]) -> list[Tensor]:
    """Two layers' states [rows, 1]: the position, and its negative."""
    positions = torch.cat([torch.arange(i.start, i.start + len(i.tokens)) for i in items])[:, None].double()
    return [positions, -positions]


def item(row: int, start: int, count: int, first: int, root: int | None = None) -> CatchUp:
    return CatchUp(row, start, [1 + start + i for i in range(count)], root, range(first, first + count))


def run(
    unread: UnreadStates, *new: tuple[int, int, int], drafting: bool = False, block: int | None = BLOCK
) -> list[tuple[int, int, int]]:
    """A step of (row, start, count); the items that are read, each with its own tokens and states."""
    pending, first = [], 0
    for row, start, count in new:
        pending.append(item(row, start, count, first, root=start + count))
        first += count
    states = states_of(pending)
    items = unread.to_read(pending, states, NAMES, drafting=drafting, block_size=block)
    if items:
        expected = torch.cat([torch.arange(i.start, i.start + len(i.tokens)) for i in items]).double()
        assert read_states(items, states).tolist() == [[p, -p] for p in expected.tolist()]
    for one in items:
        assert one.tokens == [1 + one.start + i for i in range(len(one.tokens))]
        assert (one.root is not None) == drafting
    return [(one.row, one.start, len(one.tokens)) for one in items]


def test_it_waits_until_the_head_drafts() -> None:
    unread = UnreadStates()
    assert run(unread, (0, 10, 2), (1, 3, 1)) == []
    assert run(unread, (0, 12, 1)) == []
    assert run(unread, (1, 4, 1), (0, 13, 3), drafting=True) == [(1, 3, 2), (0, 10, 6)]
    assert run(unread, (0, 16, 1), drafting=True) == [(0, 16, 1)]


def test_no_block_is_left_incomplete_and_nothing_waits_for_ever() -> None:
    unread = UnreadStates()
    assert run(unread, (0, BLOCK - 3, 2)) == []
    assert run(unread, (0, BLOCK - 1, 1)) == [(0, BLOCK - 3, 3)]
    assert run(unread, (0, BLOCK, LONGEST), (1, 0, LONGEST + 1)) == [(1, 0, LONGEST + 1)]
    assert run(unread, (0, BLOCK + LONGEST, 1)) == [(0, BLOCK, LONGEST + 1)]


def test_a_block_of_its_own_can_wait() -> None:
    unread = UnreadStates()
    assert run(unread, (0, BLOCK - 3, 5), block=None) == []
    assert run(unread, (0, BLOCK + 2, LONGEST - 4), block=None) == [(0, BLOCK - 3, LONGEST + 1)]


def test_requests_that_go_back_begin_anew_or_end() -> None:
    unread = UnreadStates()
    assert run(unread, (0, 10, 2), (1, 20, 4)) == []
    assert run(unread, (0, 12, 2)) == []
    assert run(unread, (0, 13, 1), (1, 5, 2), drafting=True) == [(0, 10, 4), (1, 5, 2)]
    assert run(unread, (0, 14, 1), (1, 7, 1)) == []
    unread.forget(["a", "never seen"])
    assert run(unread, (0, 15, 1), (1, 9, 1), drafting=True) == [(0, 15, 1), (1, 9, 1)], "a gap is not bridged"


@pytest.mark.parametrize(("shared", "size"), [(True, BLOCK), (False, None)])
def test_blocks_are_shared_where_prefixes_are_cached(shared: bool, size: int | None) -> None:
    head: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=shared)),
        runner=SimpleNamespace(input_batch=SimpleNamespace(req_ids=NAMES)),
        block_table=SimpleNamespace(block_size=BLOCK),
        unread=SimpleNamespace(to_read=lambda *_, block_size, **__: block_size),
    )
    found: Any = HeadDrafter.to_read(head, [], 0, False, None)
    assert found == size
