"""Tree attention on vLLM's paged CPU cache: what its native kernel wrote, and a level's mask."""

import pytest
import torch
from vllm import _custom_ops as ops

from vllm_adaptive_tree.engine.common.attention import DraftKeys
from vllm_adaptive_tree.engine.common.contexts import PagedContexts
from vllm_adaptive_tree.engine.cpu_cache import gather_context
from vllm_adaptive_tree.trees import Shape, SlicedMask

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
