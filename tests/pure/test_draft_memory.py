"""Bytes of a draft: the formulas, and what a draft shares with its target."""

import pytest
import torch
from torch import nn

from vllm_adaptive_tree.engine.startup.draft_memory import DraftMemory, LevelBuffers, format_bytes, own_weights

LOAD = {"requests": 3, "nodes": 10, "depth": 4, "vocabulary": 1000, "size": 2}


@pytest.mark.parametrize(
    ("changes", "feedback", "logits"),
    [
        ({}, 0, 3 * 10 * 1000 * 2),  # one level of logits
        ({"kept": True}, 0, 3 * 31 * 1000 * 2),  # the root and three levels
        ({"hidden": 64}, 3 * 31 * 64 * 2, 3 * 10 * 1000 * 2),
        ({"hidden": 64, "depth": 1, "kept": True}, 3 * 64 * 2, 3 * 1000 * 2),  # the root alone
        ({"hidden": 64, "nodes": 2, "kept": True}, 3 * 3 * 64 * 2, 3 * 3 * 1000 * 2),  # two levels of one node
        ({"size": 4}, 0, 3 * 10 * 1000 * 4),
        ({"rows": 12}, 0, 12 * 1000 * 2),  # narrow levels
        ({"rows": 12, "hidden": 64, "kept": True}, (3 + 3 * 12) * 64 * 2, (3 + 3 * 12) * 1000 * 2),
    ],
)
def test_level_buffers(changes: dict, feedback: int, logits: int) -> None:
    assert LevelBuffers.of(**{"hidden": None, "kept": False, **LOAD, **changes}) == (feedback, logits)


def test_slots_are_those_that_a_drafter_is_given() -> None:
    """As in `Frontier`: the root, then every column of every level that is read."""
    nodes, depth = 10, 4
    given = [torch.zeros(1, 1), *(torch.zeros(1, nodes) for _ in range(depth - 1))]
    levels = LevelBuffers.of(**LOAD, hidden=1, kept=True)
    assert levels.feedback == LOAD["requests"] * LOAD["size"] * torch.cat(given, 1).shape[1]


def test_shared_weights_are_the_target_s() -> None:
    target, draft = nn.Module(), nn.Module()
    target.embed, draft.own = nn.Embedding(100, 8), nn.Linear(8, 8, bias=False)
    draft.embed, draft.again = target.embed, draft.own
    draft.register_buffer("d2t", torch.zeros(16, dtype=torch.int64))
    assert own_weights(draft, target) == 8 * 8 * 4 + 16 * 8
    assert own_weights(None, target) == 0


def test_packed_weights_count() -> None:
    layer = nn.Module()
    layer.weight, layer.input_size, layer.output_size_per_partition = nn.Parameter(torch.empty(0)), 8, 16
    assert own_weights(nn.Sequential(layer), nn.Module()) == 8 * 16 * 4
    assert own_weights(nn.Sequential(layer), nn.Sequential(layer)) == 0


def test_the_levels_take_no_more_than_half() -> None:
    memory = DraftMemory(0, 0, LevelBuffers(300, 400))
    assert memory.within(10_000) == 700
    assert memory.within(1_000) == 500


def test_the_line_at_start_up() -> None:
    line = DraftMemory(3 << 20, 512, LevelBuffers(1 << 20, 5 << 30)).describe(4096)
    assert line == (
        "weights 3.0 MiB, K/V 512 bytes per token (2.0 MiB for a context of 4096), level buffers up to 5.00 GiB "
        "(hidden states 1.0 MiB, logits 5.00 GiB)"
    )
    assert format_bytes((1 << 30) - 1).endswith("MiB")
