"""What a resting head reads a little later is what it would have read at once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.engine.v1.catch_up import CatchUp
from vllm_adaptive_tree.engine.v1.reads_states import ReadsStates
from vllm_adaptive_tree.engine.v1.short_wait import LONGEST, ShortWait
from vllm_adaptive_tree.engine.v1.unread_states import states_of

BLOCK, NAMES = 128, ["a", "b"]


def states(items: list[CatchUp]) -> list[Tensor]:
    """Two layers' states [rows, 1]: the position, and its negative."""
    positions = torch.cat([torch.arange(i.start, i.start + len(i.tokens)) for i in items])[:, None].double()
    return [positions, -positions]


def run(wait: ShortWait, *new: tuple[int, int, int], drafting: bool = False) -> list[tuple[int, int, int]]:
    """A step of (row, start, count); the items that are read, each with its own tokens and states."""
    pending, first = list[CatchUp](), 0
    for row, start, count in new:
        tokens = [1 + start + i for i in range(count)]
        pending.append(CatchUp(row, start, tokens, start + count, range(first, first + count)))
        first += count
    items = wait.to_read(pending, states(pending), NAMES, drafting=drafting)
    if items:
        expected = torch.cat([torch.arange(i.start, i.start + len(i.tokens)) for i in items]).double()
        assert states_of(items, states(pending)).tolist() == [[p, -p] for p in expected.tolist()]
    for one in items:
        assert one.tokens == [1 + one.start + i for i in range(len(one.tokens))]
        assert (one.root is not None) == drafting
    return [(one.row, one.start, len(one.tokens)) for one in items]


def test_it_waits_until_the_head_drafts() -> None:
    wait = ShortWait(BLOCK)
    assert run(wait, (0, 10, 2), (1, 3, 1)) == []
    assert run(wait, (0, 12, 1)) == []
    assert run(wait, (1, 4, 1), (0, 13, 3), drafting=True) == [(1, 3, 2), (0, 10, 6)]
    assert run(wait, (0, 16, 1), drafting=True) == [(0, 16, 1)]


def test_no_block_is_left_incomplete_and_nothing_waits_for_ever() -> None:
    wait = ShortWait(BLOCK)
    assert run(wait, (0, BLOCK - 3, 2)) == []
    assert run(wait, (0, BLOCK - 1, 1)) == [(0, BLOCK - 3, 3)]
    assert run(wait, (0, BLOCK, LONGEST), (1, 0, LONGEST + 1)) == [(1, 0, LONGEST + 1)]
    assert run(wait, (0, BLOCK + LONGEST, 1)) == [(0, BLOCK, LONGEST + 1)]


def test_a_block_of_its_own_can_wait() -> None:
    wait = ShortWait(None)
    assert run(wait, (0, BLOCK - 3, 5)) == []
    assert run(wait, (0, BLOCK + 2, LONGEST - 4)) == [(0, BLOCK - 3, LONGEST + 1)]


def test_requests_that_go_back_begin_anew_or_end() -> None:
    wait = ShortWait(BLOCK)
    assert run(wait, (0, 10, 2), (1, 20, 4)) == []
    assert run(wait, (0, 12, 2)) == []
    assert run(wait, (0, 13, 1), (1, 5, 2), drafting=True) == [(0, 10, 4), (1, 5, 2)]
    assert run(wait, (0, 14, 1), (1, 7, 1)) == []
    wait.forget(["a", "never seen"])
    assert run(wait, (0, 15, 1), (1, 9, 1), drafting=True) == [(0, 15, 1), (1, 9, 1)], "a gap is not bridged"


@pytest.mark.parametrize(
    ("in_any_order", "groups", "shares", "waits", "block"),
    [
        (True, 1, True, True, BLOCK),
        (True, 2, True, False, BLOCK),
        (False, 1, True, False, BLOCK),
        (False, 1, False, False, None),
    ],
)
def test_which_heads_wait_until_a_tree_needs_it(
    in_any_order: bool, groups: int, shares: bool, waits: bool, block: int | None
) -> None:
    head: Any = SimpleNamespace(
        runner=SimpleNamespace(
            kv_cache_config=SimpleNamespace(kv_cache_groups=[None] * groups),
            cache_config=SimpleNamespace(enable_prefix_caching=shares),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
            vllm_config=SimpleNamespace(kv_transfer_config=None),
        ),
        block_table=SimpleNamespace(block_size=BLOCK),
        read_keys=None,
        unread=None,
    )
    ReadsStates.begin_waiting(head, in_any_order=in_any_order)
    assert (head.unread is not None) == waits
    assert head.short_wait.block_size == block


def test_nothing_waits_beside_a_connector() -> None:
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        vllm_config=SimpleNamespace(kv_transfer_config="any"),
    )
    head: Any = SimpleNamespace(
        runner=runner, block_table=SimpleNamespace(block_size=BLOCK), read_keys=None, unread=None
    )
    ReadsStates.begin_waiting(head, in_any_order=True)
    item = CatchUp(0, 5, [7], 6)
    assert ReadsStates.to_read(head, [item], 9, False, ()) == [item._replace(root=None)]
    assert ReadsStates.to_read(head, [item], 9, True, ()) == [item]
