"""Tree attention over a paged cache: Triton's kernels against the dense reference in float64.

Without a GPU the kernels run in Triton's interpreter, which has to be on before Triton is imported: in a process of its
own.
"""

import importlib.util
import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.attention import reference
from vllm_adaptive_tree.trees.masks import WORD, ancestor_bits

from .test_no_host_sync import DEVICES, NoHostSync
from .test_orders import recursive_tree

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
"""Largest error of an output near 1, by dtype of the inputs."""
ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def kernel() -> Any:
    from vllm_adaptive_tree.attention import triton_tree

    return triton_tree


class Batch(NamedTuple):
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    row_start: Tensor
    context: Tensor
    ancestors: Tensor
    scale: float

    @classmethod
    def of(
        cls,
        requests: list[tuple[int, list[int]]],
        *,
        heads: tuple[int, int] = (2, 1),
        head_size: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        padding: int = 0,
    ) -> "Batch":
        """Requests as (tokens in the cache, parents of the nodes behind the root); [] is a decode, None no row at all.

        The cache lies as vLLM's on CUDA, K beside V, and holds NaN where no token is; its blocks are dealt at random.
        """
        generator = torch.Generator().manual_seed(len(requests) + head_size)
        counts = [0 if parents is None else 1 + len(parents) for _, parents in requests]
        used = [-(-(length + count) // block_size) for (length, _), count in zip(requests, counts, strict=True)]
        table = torch.zeros(len(requests), max(used) + 1, dtype=torch.int32)
        cache = torch.full((sum(used) + 1, heads[1], block_size, 2 * head_size), torch.nan, dtype=torch.float64)
        blocks = iter((torch.randperm(sum(used), generator=generator) + 1).tolist())
        for request, (length, _) in enumerate(requests):
            for position in range(length + counts[request]):
                if position % block_size == 0:
                    table[request, position // block_size] = next(blocks)
                block, slot = table[request, position // block_size], position % block_size
                cache[block, :, slot] = torch.randn(heads[1], 2 * head_size, generator=generator, dtype=torch.float64)
        rows = sum(counts) + padding
        ancestors = torch.zeros(rows, -(-max(counts) // WORD), dtype=torch.int64)
        start = torch.tensor([0, *counts]).cumsum(0)
        for first, (_, parents) in zip(start.tolist(), requests, strict=False):
            if parents is not None:
                bits = ancestor_bits(torch.tensor([parents], dtype=torch.int64))[0]
                ancestors[first : first + bits.shape[0], : bits.shape[1]] = bits
        query = torch.randn(rows, heads[0], head_size, generator=generator, dtype=torch.float64)
        key, value = cache.to(DEVICE, dtype).transpose(1, 2).split(head_size, dim=-1)
        lengths = torch.tensor([length for length, _ in requests], dtype=torch.int32, device=DEVICE)
        on_device = (query.to(DEVICE, dtype), key, value, table.to(DEVICE), start.int().to(DEVICE), lengths)
        return cls(*on_device, ancestors.to(DEVICE), head_size**-0.5)

    def expected(self) -> Tensor:
        query, key, value = (tensor.double() for tensor in self[:3])
        return reference.tree_attention(query, key, value, *self[3:], torch.zeros_like(query))

    def context_result(self) -> tuple[Tensor, Tensor]:
        """Attention to the contexts alone, and the log-sum-exp of its scores [H, rows]."""
        query, groups = self.query.double(), self.query.shape[1] // self.key_cache.shape[2]
        out, lse = torch.zeros_like(query), query.new_zeros(query.shape[1::-1])
        starts = self.row_start.tolist()
        for request, length in enumerate(self.context.tolist()):
            rows, position = slice(*starts[request : request + 2]), torch.arange(length, device=query.device)
            at = (
                self.block_table[request].long()[position // self.key_cache.shape[1]],
                position % self.key_cache.shape[1],
            )
            key, value = (part[at].double().repeat_interleave(groups, 1) for part in (self.key_cache, self.value_cache))
            scores = torch.einsum("qhd,khd->hqk", query[rows], key) * self.scale
            lse[:, rows] = scores.logsumexp(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        return out.to(self.query.dtype), lse.float()

    def error(self, splits: int | None = None, context_result: tuple[Tensor, Tensor] | None = None) -> float:
        found = kernel().tree_attention(
            *self, torch.zeros_like(self.query), splits=splits, context_result=context_result
        )
        assert found.dtype == self.query.dtype
        return (found.double() - self.expected()).abs().max().item()


CHAIN = list(range(-1, 6))
FORK = [-1, -1, 0, 0, 1, 4, 4, 5, -1]


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_kernels_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k", "TestKernels"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


class TestKernels:
    __test__ = INTERPRETED or DEVICE == "cuda"

    @pytest.mark.parametrize("splits", [1, 3])
    def test_unequal_trees(self, splits):
        """A tree, a decode, nothing, a chain, a first token, and contexts that end before, at and behind a border."""
        requests = [(37, FORK), (16, []), (5, None), (15, CHAIN), (0, []), (1, FORK[:4]), (0, FORK)]
        assert Batch.of(requests).error(splits) < ERROR[torch.float32]

    @pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 50, 130])
    def test_context(self, length):
        assert Batch.of([(length, FORK)]).error() < ERROR[torch.float32]

    @pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 2), (6, 2), (8, 2), (8, 1)])
    def test_heads(self, heads):
        assert Batch.of([(19, FORK), (3, CHAIN)], heads=heads).error(2) < ERROR[torch.float32]

    @pytest.mark.parametrize("dtype", ERROR)
    @pytest.mark.parametrize("head_size", [64, 96, 128, 256])
    def test_head_size_and_dtype(self, head_size, dtype):
        batch = Batch.of([(40, FORK), (7, [])], head_size=head_size, dtype=dtype)
        assert batch.error(2) < ERROR[dtype]

    @pytest.mark.parametrize("block_size", [8, 48, 128])
    def test_block_size(self, block_size):
        assert Batch.of([(50, FORK), (block_size - 1, CHAIN)], block_size=block_size).error() < ERROR[torch.float32]

    @pytest.mark.parametrize("head_size", [64, 128])
    def test_several_words(self, head_size):
        """Rows 64, 128 and following stand in other words; bit 63 is a word's sign."""
        requests = [(20, list(recursive_tree(150, 0).parents)), (3, list(range(-1, 69))), (0, [])]
        assert Batch.of(requests, head_size=head_size).error(2) < ERROR[torch.float32]

    def test_more_splits_than_tiles(self):
        assert Batch.of([(3, FORK), (0, [])]).error(7) < ERROR[torch.float32]

    @pytest.mark.parametrize("splits", [1, 3])
    def test_contexts_that_another_kernel_has_read(self, splits):
        requests = [(37, FORK), (16, []), (5, None), (15, CHAIN), (9, list(recursive_tree(70, 0).parents))]
        batch = Batch.of(requests, heads=(4, 2))
        assert batch.error(splits, context_result=batch.context_result()) < ERROR[torch.float32]
        off = batch.context_result()
        off[1][0, 3] += 0.5
        assert batch.error(splits, context_result=off) > 1e-3

    @pytest.mark.parametrize("splits", [1, 2])
    def test_padding_rows_stay(self, splits):
        batch = Batch.of([(9, FORK), (2, None)], padding=3)
        out = torch.full_like(batch.query, 7.0)
        kernel().tree_attention(*batch, out, splits=splits)
        assert (out[-3:] == 7).all()
        assert (out[:-3] != 7).all()

    def test_a_wrong_bit_shows(self):
        batch = Batch.of([(37, FORK), (16, [])])
        batch.ancestors[5, 0] ^= 1 << 2
        right = Batch.of([(37, FORK), (16, [])])
        found = kernel().tree_attention(*batch, torch.zeros_like(batch.query))
        off = (found.double() - right.expected()).abs().amax((1, 2)) > 1e-3
        assert off.nonzero().flatten().tolist() == [5]

    def test_masks_mapped_to_the_wrong_request_show(self):
        batch = Batch.of([(20, FORK), (20, CHAIN)])
        swapped = batch._replace(ancestors=batch.ancestors.roll(len(CHAIN) + 1, 0))
        found = kernel().tree_attention(*swapped, torch.zeros_like(batch.query))
        assert (found.double() - batch.expected()).abs().max() > 0.1

    def test_tiles_without_ancestors_are_not_read(self):
        """Two branches of 80 rows each; rows of the second do not notice that a tile of the first's K/V is spoiled."""
        batch = Batch.of([(4, [-1, *range(79), -1, *range(80, 159)])], block_size=1, heads=(1, 1), head_size=128)
        expected = batch.expected()
        tiling = kernel().Tiling.of(batch.query, 1, 1, 1, 1)
        first, behind = 4 + tiling.tile, 4 + 80 // tiling.tile * tiling.tile
        assert first < behind
        for cache in (batch.key_cache, batch.value_cache):
            cache[batch.block_table[0, first:behind].long()] = torch.nan
        found = kernel().tree_attention(*batch, torch.zeros_like(batch.query))
        clean = -(-81 // tiling.lanes) * tiling.lanes  # first query tile without rows of the first branch
        assert clean < 161
        assert (found[clean:].double() - expected[clean:]).abs().max() < ERROR[torch.float32]

    def test_the_host_reads_shapes_only(self, monkeypatch):
        """Meta tensors have no values; the launches are all that is left out."""
        grids = []

        class Launch:
            def __getitem__(self, grid):
                grids.append(grid)
                return lambda *args, **kwargs: None

        monkeypatch.setattr(kernel(), "_attend", Launch())
        monkeypatch.setattr(kernel(), "_merge", Launch())
        batch = Batch.of([(37, FORK), (16, [])])
        meta = [tensor.to("meta") for tensor in batch[:7]]
        with NoHostSync():
            kernel().tree_attention(*meta, batch.scale, torch.empty_like(meta[0]), splits=4)
        assert [len(grid) for grid in grids] == [3, 2]

    def test_splits_fill_the_device_once(self):
        tiling = kernel().Tiling.of
        one = torch.empty(64, 32, 128, dtype=torch.bfloat16, device="meta")
        assert tiling(one, 8, 1, 131_072, 132) == (128, 64, 3, 8)
        assert tiling(one, 8, 1, 256, 132).splits == 1
        assert tiling(one.expand(16, -1, -1, -1).flatten(0, 1), 8, 16, 131_072, 132).splits == 1


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled there")
def test_it_compiles_for_an_h200():
    """Down to machine code, which needs no GPU."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    shapes = {"HEADS": 32, "GROUP": 4, "HEAD_SIZE": 128, "PADDED_HEAD": 128, "BLOCK_SIZE": 16, "LANES": 128, "TILE": 64}
    constants = {
        **shapes,
        "SPLITS": 4,
        "PARTS": 4,
        "READ_CONTEXT": 1,
        "PADDED_REQUESTS": 16,
        "WORD": WORD,
        "WIDEN": False,
    }
    signature = dict.fromkeys(kernel()._attend.arg_names, "i32")
    signature |= dict.fromkeys(("out", "query", "key_cache", "value_cache"), "*bf16")
    signature |= dict.fromkeys(("partial", "weight"), "*fp32")
    signature |= dict.fromkeys(("block_table", "row_start", "context"), "*i32")
    signature |= {"ancestors": "*i64", "scale": "fp32", **dict.fromkeys(constants, "constexpr")}
    places = {(list(signature).index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel()._attend, signature, places)
    found = compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "num_stages": 3})
    assert len(found.asm["cubin"]) > 1000
    assert found.metadata.shared <= 227 * 1024, "shared memory of a block"


@DEVICES
@pytest.mark.parametrize("nodes", [1, 2, 7, 63, 64, 130])
def test_ancestor_bits(nodes, device):
    trees = [recursive_tree(nodes, seed).parents for seed in range(3)] + [tuple(range(-1, nodes - 1))]
    parent = torch.tensor(trees).to(device)
    with NoHostSync():
        bits = ancestor_bits(parent)
    assert bits.shape == (4, 1 + nodes, -(-(1 + nodes) // WORD))
    assert bits.dtype == torch.int64
    if device == "meta":
        return
    for tree, words in zip(trees, bits.tolist(), strict=True):
        sets = [{0}]
        for node, parent in enumerate(tree):
            sets.append(sets[parent + 1] | {node + 1})
        found = [{row for row in range(1 + nodes) if of_row[row // WORD] >> row % WORD & 1} for of_row in words]
        assert found == sets


def test_ancestor_bits_of_no_node():
    assert ancestor_bits(torch.empty(2, 0, dtype=torch.int64)).tolist() == [[[1]]] * 2


def test_reference_is_causal_attention_for_a_chain():
    batch = Batch.of([(21, CHAIN)], heads=(4, 2), dtype=torch.float64)
    length = 21 + len(CHAIN) + 1
    position = torch.arange(length, device=DEVICE)
    at = (batch.block_table[0].long()[position // 16], position % 16)
    key, value = (cache[at].transpose(0, 1)[None] for cache in (batch.key_cache, batch.value_cache))
    mask = position <= position[21:, None]
    query = batch.query.transpose(0, 1)[None]
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    torch.testing.assert_close(batch.expected(), dense[0].transpose(0, 1))
