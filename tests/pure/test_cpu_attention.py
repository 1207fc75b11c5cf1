"""Tree attention on a CPU: masked attention against float64, and reading each packing of vLLM's cache."""

import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.attention.cpu import attend, context_bias
from vllm_adaptive_tree.engine.cpu_cache import PACKINGS, gather_context

LENGTHS = [1, 31, 32, 33, 100]  # contexts across block borders
BLOCK_SIZE = 32


def at(isa: str, position: int, d: int, dim: int) -> tuple[int, int]:
    """Offsets of entry `d` of the key and of the value at `position` of a block in a packing, in their halves."""
    if isa != "amx":
        return d * BLOCK_SIZE + position, position * dim + d
    key_tile, value_tile = (position // 16 * (dim // 2) + d // 2), (d // 16 * (BLOCK_SIZE // 2) + position // 2)
    return (key_tile * 16 + position % 16) * 2 + d % 2, (value_tile * 16 + d % 16) * 2 + position % 2


@pytest.mark.parametrize("isa", PACKINGS)
@pytest.mark.parametrize("dim", [16, 32])
def test_a_context_is_gathered_from_its_blocks(isa: str, dim: int) -> None:
    torch.manual_seed(0)
    heads, tables = 2, torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)
    key, value = torch.randn(2, len(tables), heads, 2 * BLOCK_SIZE, dim).to(torch.bfloat16)
    cache = torch.full((6, heads, 2, BLOCK_SIZE * dim), torch.nan, dtype=torch.bfloat16)  # other blocks are not read
    for block_in_request in range(2):
        for position in range(BLOCK_SIZE):
            here = block_in_request * BLOCK_SIZE + position
            for d in range(dim):
                key_at, value_at = at(isa, position, d, dim)
                cache[tables[:, block_in_request], :, 0, key_at] = key[:, :, here, d]
                cache[tables[:, block_in_request], :, 1, value_at] = value[:, :, here, d]
    found = gather_context(cache.view(6, heads, BLOCK_SIZE, 2 * dim), tables, isa)
    assert torch.equal(found[0], key.float())
    assert torch.equal(found[1], value.float())


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
def test_attend_against_float64(heads: int, kv_heads: int) -> None:
    torch.manual_seed(1)
    requests, rows, dim, width = len(LENGTHS), 7, 32, max(LENGTHS)
    query = torch.randn(requests, rows, heads, dim)
    key, value = torch.randn(2, requests, kv_heads, width + rows, dim)
    mask = torch.rand(requests, rows, rows) < 0.4  # unequal trees: any mask that sees the root
    mask[:, :, 0] = True
    tree = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    bias = torch.cat([context_bias(torch.tensor(LENGTHS), width).expand(-1, rows, -1), tree], 2)
    out = attend(query, key, value, bias, dim**-0.5)

    seen = torch.cat([torch.arange(width) < torch.tensor(LENGTHS)[:, None, None].expand(-1, rows, 1), mask], 2)
    assert out.shape == query.shape
    for head in range(heads):
        k, v = (each[:, head // (heads // kv_heads)].double() for each in (key, value))
        expected = masked(query[:, :, head].double(), k, v, seen, dim**-0.5)
        assert (out[:, :, head] - expected).abs().max() < 1e-5


def masked(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attention of one head, [R, T, D], over the keys [R, L, D] that each row sees, [R, T, L] bool."""
    scores = (query @ key.mT * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value
