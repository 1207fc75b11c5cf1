"""Top-k through chunks of 64 tokens agrees with a full sort."""

import pytest
import torch

from vllm_adaptive_tree.vocab_ops import SORT_LIMIT, joint_topk


@pytest.mark.parametrize("k", [1, 16, 70])
@pytest.mark.parametrize(
    ("width", "vocabulary"),
    [(2, 100), (4, SORT_LIMIT // 4), (5, SORT_LIMIT // 4), (3, SORT_LIMIT // 2 + 1), (9, 2047), (1, SORT_LIMIT + 63)],
    ids=["short", "short-full", "chunks", "chunks-rest-1", "chunks-rest-63", "one-row"],
)
def test_joint_topk(width: int, vocabulary: int, k: int) -> None:
    generator = torch.Generator().manual_seed(width * vocabulary + k)
    rows = torch.randn(3, width, vocabulary, generator=generator)
    rows[:, 0, -1] = rows[:, -1, -1] = 9.0  # the last of a row, where a last chunk may be cut
    offset = torch.randn(3, width, generator=generator)
    if width > 2:
        offset[:, 1] = -torch.inf  # a column that nobody uses
    before = rows.clone()

    value, row, token = joint_topk(rows, offset, k)

    whole = (before + offset[..., None]).flatten(1).sort(dim=1, descending=True)
    assert torch.equal(value, whole.values[:, :k])
    assert torch.equal(row * vocabulary + token, whole.indices[:, :k])
    assert (token < vocabulary).all()
    assert torch.equal(rows, before)
