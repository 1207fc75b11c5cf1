"""KV cache of vLLM's CPU build, read as plain tensors.

Its native kernel has no mask and returns no log-sum-exp, so its result cannot be merged with a tree part.
"""

from torch import Tensor

PACKINGS = ("vec", "vec16", "amx")
"""Packings of vLLM's CPU cache that `gather_context` can read: those of x86."""


def gather_context(kv_cache: Tensor, block_table: Tensor, isa: str) -> tuple[Tensor, Tensor]:
    """Copy the blocks of R requests out of the cache, as float32.

    Args:
        kv_cache: [blocks, Hkv, block_size, 2 * head_dim], the layer's cache.
        block_table: [R, B] blocks of each request, enough for the longest context.
        isa: the cache's packing as vLLM names it, one of `PACKINGS`.

    Returns:
        key and value, [R, Hkv, B * block_size, head_dim].
    """
    requests, blocks = block_table.shape
    _, heads, block_size, both = kv_cache.shape
    dim = both // 2
    flat = kv_cache.flatten(2).index_select(0, block_table.flatten().long())  # [R * B, Hkv, 2 * block_size * dim]
    key, value = flat.view(requests, blocks, heads, 2, block_size * dim).unbind(3)
    if isa == "amx":  # bfloat16 tiles: K [bs / 16, dim / 2, 16, 2], V [dim / 16, bs / 2, 16, 2]
        key = key.unflatten(3, (block_size // 16, dim // 2, 16, 2)).permute(0, 2, 1, 3, 5, 4, 6)
        value = value.unflatten(3, (dim // 16, block_size // 2, 16, 2)).permute(0, 2, 1, 4, 6, 3, 5)
    else:  # K [dim, bs], V [bs, dim]
        key = key.unflatten(3, (dim, block_size)).permute(0, 2, 1, 4, 3)
        value = value.unflatten(3, (block_size, dim)).permute(0, 2, 1, 3, 4)
    shape = (requests, heads, blocks * block_size, dim)
    return key.float().reshape(shape), value.float().reshape(shape)
