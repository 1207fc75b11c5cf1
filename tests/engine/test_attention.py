"""Tree attention on vLLM's paged CPU cache against a dense reference in float64."""

import pytest
import torch
from vllm import _custom_ops as ops

from vllm_adaptive_tree.attention.cpu import attend, context_bias, gather_context
from vllm_adaptive_tree.engine.common.attention import DraftKeys
from vllm_adaptive_tree.engine.common.contexts import PagedContexts
from vllm_adaptive_tree.trees import Shape, SlicedMask

LENGTHS = [1, 31, 32, 33, 100]  # contexts across block borders


AMX = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")


@pytest.mark.parametrize("isa", ["vec", "vec16", pytest.param("amx", marks=AMX)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_gather_reads_what_the_native_op_wrote(isa: str, dtype: torch.dtype, dim: int) -> None:
    if isa == "amx" and dtype == torch.float32:
        pytest.skip("vLLM packs for AMX in bfloat16 only")
    torch.manual_seed(0)
    heads, block_size, count = 2, 32, 70
    cache = torch.zeros(6, heads, block_size, 2 * dim, dtype=dtype)
    key, value = torch.randn(2, count, heads, dim).to(dtype)
    blocks = torch.tensor([[4, 1, 3]], dtype=torch.int32)
    slots = blocks[0, torch.arange(count) // block_size] * block_size + torch.arange(count) % block_size
    halves = cache.view(6, heads, 2 * block_size, dim).chunk(2, dim=2)
    arguments = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
    ops.cpu_attn_reshape_and_cache(key, value, *halves, slots.long(), isa, **arguments)
    unwritten = torch.full((1,), -1)
    ops.cpu_attn_reshape_and_cache(key[:1] + 9, value[:1] + 9, *halves, unwritten, isa, **arguments)
    gathered_key, gathered_value = gather_context(cache, blocks, isa)
    assert torch.equal(gathered_key[0, :, :count].transpose(0, 1), key.float())
    assert torch.equal(gathered_value[0, :, :count].transpose(0, 1), value.float())


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
    for r, length in enumerate(LENGTHS):
        for t in range(rows):
            seen = torch.cat([torch.arange(width) < length, mask[r, t]])
            for h in range(heads):
                k, v = (x[r, h // (heads // kv_heads)][seen].double() for x in (key, value))
                expected = ((query[r, t, h].double() @ k.T) * dim**-0.5).softmax(-1) @ v
                assert (out[r, t, h] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("cut", [False, True])
def test_a_sliced_mask_is_the_one_built_level_by_level(cut: bool) -> None:
    shape = Shape.k_config((3, 2, 1))
    inner = [path for path in ((), *shape.paths) if shape.num_children(path)]
    built, sliced = (
        DraftKeys(PagedContexts(torch.zeros(2, 1, dtype=torch.int32), 32), torch.tensor([5, 9])) for _ in range(2)
    )
    sliced.sliced = SlicedMask(shape)
    for level in range(1, shape.depth):
        paths = [path for path in inner if len(path) == level]
        if cut and level == 1:
            paths = paths[:-1]
            inner = [path for path in inner if path[:1] != (2,)]
        parent = torch.tensor([[inner.index(path[:-1]) for path in paths]] * 2)
        for keys in (built, sliced):
            keys.open_level(parent)
        assert torch.equal(built.seen, sliced.seen)
        assert torch.equal(built.bias, sliced.bias)
    assert (sliced.sliced is None) == cut, "a level that is not read in full ends it"
