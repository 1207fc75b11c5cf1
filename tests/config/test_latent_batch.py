"""Parts of a batch of latent layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_adaptive_tree.engine.v2.latent_batch import Chains, LatentBuilder
from vllm_adaptive_tree.trees.masks import ancestor_bits


@pytest.mark.parametrize("counts", [[1, 5, 2], [64, 1, 63, 65], [0, 130, 0, 3]])
def test_a_row_of_a_chain_sees_those_before_it(counts: list[int]) -> None:
    """The plan is the kernel's, which is not here."""
    start = torch.tensor([0, *counts]).cumsum(0).int()
    chains = Chains(start, start[1:], torch.zeros(len(counts), 1), sum(counts) + 2, max(counts), 999)
    plan: Any = SimpleNamespace(update=lambda *_: None)
    trees: Any = chains.metadata(None, 16, plan)
    words = -(-max(counts) // 64)
    rows = []
    for count in counts:
        if count:
            bits = ancestor_bits(torch.arange(-1, count - 2)[None])[0]
            rows.append(torch.nn.functional.pad(bits, (0, words - bits.shape[1])))
    assert torch.equal(trees.ancestors[: sum(counts)], torch.cat(rows))


def test_without_kernels_a_chain_sees_its_context_and_what_came_before() -> None:
    """Rows that the host counts and the device does not have are left out, and so are requests without a row."""
    start, context = torch.tensor([0, 3, 3, 4]).int(), torch.tensor([5, 9, 0]).int()
    table = torch.arange(6).view(3, 2).int()
    trees: Any = Chains(start, context, table, rows=7, most=4, longest=8).metadata(None, 4, None)
    assert trees.rows.tolist() == [[0, 1, 2, 0], [3, 3, 3, 3]]
    assert trees.position.tolist() == [[5, 6, 7, 5], [0, 0, 0, 0]]
    assert trees.block_table.tolist() == [[0, 1], [4, 5]]
    seen = trees.bias == 0
    assert seen[0, :, :8].sum(1).tolist() == [5] * 4
    lower = torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.equal(seen[0, :, 8:], lower[[0, 1, 2, 0]])
    assert seen[1, 0].nonzero().flatten().tolist() == [8]


def test_what_is_left_of_a_batch() -> None:
    """The device alone knows how many rows each tree has; the host knows their sum, and all other lengths."""
    built: list[Any] = []
    native = SimpleNamespace(build=lambda prefix, common: built.append(common) or common)
    builder = LatentBuilder(native)
    common = CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 2, 8, 13, 14]),
        query_start_loc_cpu=torch.tensor([0, 4, 8, 13, 14]),
        seq_lens=torch.tensor([12, 26, 5, 9]),
        seq_lens_cpu_upper_bound=torch.tensor([14, 24, 5, 9]),
        num_reqs=4,
        num_actual_tokens=14,
        max_query_len=6,
        max_seq_len=26,
        block_table_tensor=torch.arange(8).view(4, 2),
        slot_mapping=torch.arange(100, 114),
        is_prefilling=torch.tensor([False, False, True, False]),
    )
    assert native.build(0, common) is common
    builder.waits = True
    assert native.build(0, common) is builder
    assert builder.whole() is common
    rest = builder.others(2, 8)
    assert rest is not None
    assert rest.first == 8
    left = rest.metadata
    assert (left.num_reqs, left.num_actual_tokens, left.max_query_len) == (2, 6, 5)
    assert left.query_start_loc.tolist() == left.query_start_loc_cpu.tolist() == [0, 5, 6]
    assert left.seq_lens.tolist() == left.seq_lens_cpu_upper_bound.tolist() == [5, 9]
    assert left.block_table_tensor.tolist() == [[4, 5], [6, 7]]
    assert left.slot_mapping.tolist() == list(range(108, 114))
    assert left.is_prefilling.tolist() == [True, False]
    assert builder.others(4, 14) is None
    assert len(built) == 3
