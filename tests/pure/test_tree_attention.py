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


def plans() -> Any:
    from vllm_adaptive_tree.attention import plan

    return plan


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

    def expected(self, **variant: Any) -> Tensor:
        query, key, value = (tensor.double() for tensor in self[:3])
        return reference.tree_attention(query, key, value, *self[3:], torch.zeros_like(query), **variant)

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

    def plan(self, processors: int | None = None) -> Any:
        """Splits of a tile each; so many processors to fill."""
        rows, heads, head_size = self.query.shape
        shape = rows, len(self.context), heads, self.key_cache.shape[2], head_size
        plan = kernel().AttentionPlan(
            *shape, self.query.dtype, torch.device(DEVICE), processors=processors, tiles_per_split=1
        )
        return plan.update(self.row_start, self.context)

    def error(self, processors: int | None = None, variant: dict[str, Any] | None = None, **options: Any) -> float:
        if processors is not None:
            options["plan"] = self.plan(processors)
        found = kernel().tree_attention(*self, torch.zeros_like(self.query), **(variant or {}), **options)
        assert found.dtype == self.query.dtype
        return (found.double() - self.expected(**(variant or {}))).abs().max().item()


class Level(Batch):
    """Levels of W nodes for every request, their K/V in slots beside the cache."""

    own: tuple[Tensor, Tensor]  # [R, S, Hkv, D]
    masks: Tensor  # [R, S, words]

    @classmethod
    def of(cls, contexts: list[int], width: int, levels: int, **options: Any) -> "Level":
        requests, slots = len(contexts), width * levels
        batch = Batch.of([(length, [-1] * (width - 1)) for length in contexts], **options)
        generator = torch.Generator().manual_seed(1)
        drawn = torch.rand(requests, slots, slots, generator=generator) < 0.3
        seen = drawn.tril(-1) | torch.eye(slots, dtype=torch.bool)
        words = -(-slots // WORD)
        padded = torch.nn.functional.pad(seen, (0, words * WORD - slots)).unflatten(2, (words, WORD)).long()
        level = cls(*batch)
        heads, head_size = batch.key_cache.shape[2:]
        both = torch.randn(2, requests, heads, slots, head_size, generator=generator, dtype=torch.float64)
        level.own = tuple(both.to(DEVICE, batch.query.dtype).transpose(2, 3))
        level.masks = (padded << torch.arange(WORD)).sum(3).to(DEVICE)
        return level

    def error(self, offset: int, processors: int = 1, plan: Any = None, **variant: Any) -> float:
        """Of the level whose first slot is `offset`."""
        width = len(self.query) // len(self.context)
        bits = self.masks[:, offset : offset + width].flatten(0, 1)
        given = (*self[:6], bits, self.scale)
        own = kernel().OwnKeys(*self.own, offset)
        plan = self.plan(processors) if plan is None else plan
        found = kernel().tree_attention(*given, torch.zeros_like(self.query), own=own, plan=plan, **variant)
        doubled = tuple(part.double() for part in self.own)
        query, key, value = (part.double() for part in self[:3])
        out = torch.zeros_like(query)
        expected = reference.tree_attention(query, key, value, *given[3:], out, own=(*doubled, offset), **variant)
        return (found.double() - expected).abs().max().item()


def in_eight_bits(batch: Batch, scales: list[list[float]], *, queries: bool) -> tuple[Batch, Batch, Any]:
    """The batch with a cache of 8 bits, and such queries; what it stands for, in float64; its scales, of queries, keys
    and values."""
    factors = [torch.tensor(one, device=DEVICE) for one in scales]
    heads = batch.key_cache.shape[2]
    wide = [one.expand(heads)[:, None] for one in factors]
    wide[0] = wide[0].repeat_interleave(batch.query.shape[1] // heads, 0)
    stored, meant = [], []
    for at, (part, factor) in enumerate(zip(batch[:3], wide, strict=True)):
        if at == 0 and not queries:
            stored.append(part)
            meant.append(part.double())
            continue
        stored.append(torch.where(part.isnan(), 0.0, part / factor).to(torch.float8_e4m3fn))
        meant.append(stored[-1].double() * factor)
    return Batch(*stored, *batch[3:]), Batch(*meant, *batch[3:]), kernel().Scales(*factors)


CHAIN = list(range(-1, 6))
FORK = [-1, -1, 0, 0, 1, 4, 4, 5, -1]


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
def test_kernels_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "TestKernels or TestPlan",
    ]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


class TestKernels:
    __test__ = INTERPRETED or DEVICE == "cuda"

    @pytest.mark.parametrize("processors", [1, 3, 50])
    def test_unequal_trees(self, processors):
        """A tree, a decode, nothing, a chain, a first token, and contexts that end before, at and behind a border."""
        requests = [(37, FORK), (16, []), (5, None), (15, CHAIN), (0, []), (1, FORK[:4]), (0, FORK)]
        assert Batch.of(requests).error(processors) < ERROR[torch.float32]

    @pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 50, 130])
    def test_context(self, length):
        assert Batch.of([(length, FORK)]).error() < ERROR[torch.float32]

    @pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 2), (6, 2), (8, 2), (8, 1)])
    def test_heads(self, heads):
        assert Batch.of([(19, FORK), (3, CHAIN)], heads=heads).error(8) < ERROR[torch.float32]

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
        assert Batch.of(requests, head_size=head_size).error(8) < ERROR[torch.float32]

    def test_many_splits(self):
        """More than the merge reads at once, and not a multiple of that."""
        batch = Batch.of([(600, FORK), (2, CHAIN), (40, [])])
        splits = batch.plan(40).merges[:, 1]
        assert splits[0] % 8 > 0
        assert splits[0] > 16
        assert batch.error(40) < ERROR[torch.float32]

    def test_a_decode_in_a_tile_of_one_row(self):
        batch = Batch.of([(70, []), (3, []), (0, [])], heads=(16, 1))
        assert batch.plan(1).tile_rows == 1
        assert batch.error(5) < ERROR[torch.float32]

    @pytest.mark.parametrize("processors", [1, 6])
    def test_contexts_that_another_kernel_has_read(self, processors, monkeypatch):
        requests = [(37, FORK), (16, []), (5, None), (15, CHAIN), (9, list(recursive_tree(70, 0).parents))]
        batch = Batch.of(requests, heads=(4, 2))
        plan = batch._replace(context=torch.zeros_like(batch.context)).plan(processors)
        assert batch.error(plan=plan, context_result=batch.context_result()) < ERROR[torch.float32]
        off = batch.context_result()
        off[1][0, 3] += 0.5
        assert batch.error(context_result=off) > 1e-3

    @pytest.mark.parametrize("processors", [1, 6])
    @pytest.mark.parametrize("kind", ["window", "soft-cap", "sinks", "all"])
    def test_windows_soft_caps_and_sinks(self, kind, processors):
        """Windows that begin before, at and behind a border of tiles, and one that is longer than the contexts."""
        requests = [(137, FORK), (64, []), (5, None), (75, CHAIN), (0, []), (40, FORK[:4]), (9, FORK)]
        batch = Batch.of(requests, heads=(4, 2))
        variants = {
            "window": {"window": 20},
            "soft-cap": {"soft_cap": 0.8},
            "sinks": {"sinks": torch.tensor([0.5, -2.0, 3.0, 0.0], device=DEVICE)},
        }
        variants["all"] = {**variants["window"], **variants["soft-cap"], **variants["sinks"]}
        assert batch.error(processors, variants[kind]) < 2 * ERROR[torch.float32]
        assert (batch.expected(**variants[kind]) - batch.expected()).abs().max() > 1e-2
        if kind == "window":
            for window in (8, 64, 65, 137, 500):
                assert batch.error(processors, {"window": window}) < ERROR[torch.float32]

    def test_a_window_of_a_large_tree(self):
        """Its rows stand in several words, and their depths are counted over all of them."""
        batch = Batch.of([(50, list(recursive_tree(150, 0).parents)), (90, list(range(-1, 69)))])
        assert batch.error(8, {"window": 72}) < ERROR[torch.float32]

    def test_blocks_before_a_window_are_not_read(self):
        """vLLM gives them to others while the request goes on: its table then names block 0."""
        batch, window = Batch.of([(100, FORK)]), 20
        expected = batch.expected(window=window)
        batch.block_table[0, : (100 + 1 - window) // 16] = 0
        for cache in (batch.key_cache, batch.value_cache):
            cache[0] = torch.nan
        for processors in (1, 8):
            found = kernel().tree_attention(
                *batch, torch.zeros_like(batch.query), plan=batch.plan(processors), window=window
            )
            assert (found.double() - expected).abs().max() < ERROR[torch.float32]

    @pytest.mark.parametrize("processors", [1, 4])
    def test_padding_rows_stay(self, processors):
        batch = Batch.of([(9, FORK), (2, None)], padding=3)
        out = torch.full_like(batch.query, 7.0)
        kernel().tree_attention(*batch, out, plan=batch.plan(processors))
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
        expected, plan = batch.expected(), batch.plan()
        first, behind = 4 + plan.tile, 4 + 80 // plan.tile * plan.tile
        assert first < behind
        for cache in (batch.key_cache, batch.value_cache):
            cache[batch.block_table[0, first:behind].long()] = torch.nan
        found = kernel().tree_attention(*batch, torch.zeros_like(batch.query))
        clean = -(-81 // plan.lanes) * plan.lanes  # first query tile without rows of the first branch
        assert clean < 161
        assert (found[clean:].double() - expected[clean:]).abs().max() < ERROR[torch.float32]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
    def test_level(self, heads, dtype):
        """Own rows beside the cache: levels of a growing tree, over contexts around a border and without one."""
        level = Level.of([0, 1, 15, 16, 17, 100], 3, 4, heads=heads, dtype=dtype)
        for offset in (0, 3, 9):
            assert level.error(offset) < ERROR[dtype]
        variant = {"window": 25, "soft_cap": 0.8, "sinks": torch.linspace(-1, 1, heads[0], device=DEVICE)}
        assert level.error(9, **variant) < 2 * ERROR[dtype]

    @pytest.mark.parametrize("head_size", [64, 96, 128, 256])
    def test_level_of_several_words(self, head_size):
        """Slots 63, 64 and 127, 128 stand at the border of words, offset 60 in the middle of a tile."""
        level = Level.of([33, 2], 30, 5, head_size=head_size)
        for offset in (30, 60, 120):
            assert level.error(offset, processors=8) < ERROR[torch.float32]

    def test_a_level_reads_no_slot_after_its_own(self):
        """They hold NaN: what a later level will write."""
        level = Level.of([20], 4, 2)
        level.own[0][:, 4:], level.own[1][:, 4:] = torch.nan, torch.nan
        assert level.error(0) < ERROR[torch.float32]

    def test_one_plan_for_all_layers_and_levels(self):
        """Nothing stays in it that would spoil the next launch, or the next step with other lengths."""
        level = Level.of([90, 3, 40], 3, 4)
        other = Level.of([7, 120, 0], 3, 4)
        plan = level.plan(12)
        for one in (level, other, level):
            plan.update(one.row_start, one.context)
            for offset in (0, 6, 3):
                assert one.error(offset, plan=plan) < ERROR[torch.float32]

    @pytest.mark.parametrize("queries", [False, True])
    @pytest.mark.parametrize("scales", [[[0.5], [0.25], [2.0]], [[0.5, 2.0], [0.25, 1.0], [1.0, 0.5]]])
    def test_eight_bits(self, scales, queries):
        """A cache, with queries or without, by one scale or one for each KV head; the expectation is over the values
        that they stand for."""
        batch = Batch.of([(37, FORK), (16, []), (0, CHAIN)], heads=(4, 2), dtype=torch.bfloat16)
        stored, meant, factors = in_eight_bits(batch, scales, queries=queries)
        found = kernel().tree_attention(*stored, torch.zeros_like(batch.query), scales=factors)
        assert (found.double() - meant.expected()).abs().max() < ERROR[torch.bfloat16]

    @pytest.mark.parametrize("queries", [False, True])
    def test_a_level_over_contexts_of_eight_bits(self, queries):
        """Its own K/V has the model's dtype, and no scale."""
        level = Level.of([33, 2], 4, 2, heads=(4, 2), dtype=torch.bfloat16)
        stored, meant, factors = in_eight_bits(level, [[0.5], [0.25], [2.0]], queries=queries)
        for offset in (0, 4):
            bits = level.masks[:, offset : offset + 4].flatten(0, 1)
            own, doubled = kernel().OwnKeys(*level.own, offset), tuple(part.double() for part in level.own)
            out = torch.zeros_like(level.query)
            found = kernel().tree_attention(*stored[:6], bits, level.scale, out, own=own, scales=factors)
            expected = reference.tree_attention(
                *meant[:6], bits, level.scale, torch.zeros_like(meant.query), own=(*doubled, offset)
            )
            assert (found.double() - expected).abs().max() < ERROR[torch.bfloat16]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kv_heads", [1, 3])
    def test_latents(self, kv_heads, dtype):
        """Values are the first part of longer keys, which several KV heads share in memory."""
        requests = [(37, FORK), (16, []), (5, None), (0, CHAIN), (9, list(recursive_tree(70, 0).parents))]
        batch = Batch.of(requests, heads=(6, 1), head_size=80, dtype=dtype)
        key = batch.key_cache.expand(-1, -1, kv_heads, -1)
        batch = batch._replace(key_cache=key, value_cache=key[..., :64])
        out = batch.query.new_zeros(*batch.query.shape[:2], 64)
        expected = reference.tree_attention(*(part.double() for part in batch[:3]), *batch[3:], out.double())
        for processors in (1, 6):
            shape = (len(out), len(batch.context), 6, kv_heads, 64, dtype, torch.device(DEVICE))
            plan = plans().AttentionPlan(*shape, processors=processors, tiles_per_split=1)
            plan.update(batch.row_start, batch.context)
            found = kernel().tree_attention(*batch, out.clone(), plan=plan)
            assert (found.double() - expected).abs().max() < ERROR[dtype]

    def test_a_level_of_latents(self):
        level = Level.of([0, 15, 16, 100], 3, 4, heads=(6, 1), head_size=80)
        key, own = (part.expand(-1, -1, 3, -1) for part in (level.key_cache, level.own[0]))
        caches, heads = (key, key[..., :64]), (own, own[..., :64])
        out = level.query.new_zeros(*level.query.shape[:2], 64)
        for offset in (0, 9):
            given = (*level[3:6], level.masks[:, offset : offset + 3].flatten(0, 1), level.scale)
            found = kernel().tree_attention(
                level.query, *caches, *given, out.clone(), own=kernel().OwnKeys(own, own, offset)
            )
            wide = [part.double() for part in (level.query, *caches)]
            doubled = (heads[0].double(), heads[1].double(), offset)
            expected = reference.tree_attention(*wide, *given, out.double(), own=doubled)
            assert (found.double() - expected).abs().max() < ERROR[torch.float32]

    def test_the_host_reads_shapes_only(self, monkeypatch):
        """Meta tensors have no values; the launches are all that is left out."""
        grids = []

        class Launch:
            def __getitem__(self, grid):
                grids.append(grid)
                return lambda *args, **kwargs: None

        monkeypatch.setattr(plans(), "_plan", Launch())
        monkeypatch.setattr(kernel(), "_attend", Launch())
        monkeypatch.setattr(kernel(), "_merge", Launch())
        batch = Batch.of([(37, FORK), (16, [])])
        meta = [tensor.to("meta") for tensor in batch[:7]]
        with NoHostSync():
            kernel().tree_attention(*meta, batch.scale, torch.empty_like(meta[0]))
        assert [len(grid) for grid in grids] == [3, 3, 3]


class TestPlan:
    __test__ = INTERPRETED or DEVICE == "cuda"

    def work(
        self, counts: list[int], contexts: list[int], *, processors: int, kv_heads: int = 1, **options: Any
    ) -> Any:
        """{request: splits}, after checking that the entries are what they have to be."""
        rows = sum(counts) + 3
        plan = plans().AttentionPlan(
            rows,
            len(counts),
            kv_heads,
            kv_heads,
            128,
            torch.bfloat16,
            torch.device(DEVICE),
            processors=processors,
            **options,
        )
        plan.merges.fill_(77)
        start = torch.tensor([0, *counts]).cumsum(0).int()
        plan.update(start.to(DEVICE), torch.tensor(contexts, dtype=torch.int32, device=DEVICE))
        work = plan.work[: plan.items.item()].tolist()
        merges = plan.merges.tolist()
        assert len({tuple(entry) for entry in work}) == len(work) <= len(plan.work)
        self.order = list(dict.fromkeys(request for request, *_ in work))
        slots, splits = [], {}
        for request, count in enumerate(counts):
            tiles = sorted({first for number, first, _ in work if number == request})
            assert tiles == list(range(0, count, plan.tile_rows))
            for first in tiles:
                parts = sorted(split for number, at, split in work if (number, at) == (request, first))
                rows_of_tile = merges[start[request] + first : start[request] + min(first + plan.tile_rows, count)]
                assert parts == list(range(len(parts)))
                assert [place for _, _, place in rows_of_tile] == list(range(len(rows_of_tile)))
                assert {tuple(row[:2]) for row in rows_of_tile} == {(rows_of_tile[0][0], len(parts))}
                slots += range(rows_of_tile[0][0], rows_of_tile[0][0] + len(parts)) if len(parts) > 1 else []
                splits[request] = len(parts)
        assert len(set(slots)) == len(slots), "two partial results in one slot"
        assert all(slot < plan.slots for slot in slots)
        assert all(row[1] == 0 for row in merges[start[-1] :]), "nothing to merge in padding"
        return splits

    def test_splits_follow_the_contexts_not_the_shapes(self):
        long, short = 64 * 400, 40
        assert self.work([65], [long], processors=132)[0] == 64
        assert self.work([65], [short], processors=132)[0] == 1
        mixed = self.work([65, 65, 0, 1], [long, short, long, short], processors=132)
        assert mixed[0] > 32
        assert mixed[1] == mixed[3] == 1
        assert 2 not in mixed

    def test_a_request_of_a_chat_has_programs_for_a_third_of_a_device(self):
        splits = self.work([25], [600], processors=132, kv_heads=8, rows_per_request=25)[0]
        assert 8 * splits == 40
        eight = self.work([25] * 8, [600] * 8, processors=132, kv_heads=8, rows_per_request=25)
        assert set(eight.values()) == {1}, "the requests fill it"

    def test_long_parts_are_dealt_out_first(self):
        """Else a program begins one when the others have ended. Here the longest context is split, and its parts are
        shorter than the second."""
        splits = self.work([60, 60, 0, 60, 60], [500, 4000, 900, 500, 8192], processors=6, kv_heads=1)
        assert splits == {0: 1, 1: 1, 3: 1, 4: 3}
        assert self.order == [1, 4, 0, 3]

    def test_padded_requests_take_nothing(self):
        """A graph for 64 requests of one row, in which one request has 64 rows."""
        splits = self.work([64, *[0] * 63], [64 * 200, *[0] * 63], processors=132, kv_heads=8, rows_per_request=64)
        assert splits == {0: 15}

    @pytest.mark.parametrize("seed", range(6))
    def test_any_batch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        requests = int(torch.randint(1, 12, (), generator=generator))
        counts = torch.randint(0, 150, (requests,), generator=generator).tolist()
        contexts = (torch.rand(requests, generator=generator) ** 4 * 30_000).int().tolist()
        for processors in (1, 16, 132):
            for kv_heads in (1, 8, 40):
                self.work(counts, contexts, processors=processors, kv_heads=kv_heads, tiles_per_split=1 + seed % 4)

    def test_a_device_is_filled_once(self):
        one = self.work([64], [131_072 - 64], processors=132, kv_heads=8, rows_per_request=65)
        assert one == {0: 16}  # one tile of 128 rows for each of 8 heads
        assert self.work([64] * 16, [131_072] * 16, processors=132, kv_heads=8) == dict.fromkeys(range(16), 1)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")
def test_three_sizes_of_query_tiles():
    """Whatever the batch: a compiled variant each."""
    tiling = plans().Tiling.of
    for group in (1, 2, 4, 5, 7, 8, 12, 16):
        found = {tiling(group, 128, 2, rows).lanes for rows in range(1, 300)}
        assert found <= set(plans().LANES)
    assert tiling(4, 128, 2, 65) == (128, 64, 8)
    assert tiling(4, 128, 2, 1) == (16, 64, 4)
    assert tiling(24, 128, 2, 1).lanes == 64
    assert tiling(4, 256, 2, 65) == (64, 32, 8)
    assert tiling(40, 256, 2, 1).lanes == 64


@pytest.mark.skipif(DEVICE != "cuda", reason="no GPU")
def test_a_cuda_graph_serves_other_lengths():
    """The plan is part of it: of the batch of the capture nothing remains but shapes."""
    first, second = Batch.of([(400, FORK), (3, CHAIN), (40, [])]), Batch.of([(3, FORK), (40, CHAIN), (400, [])])
    buffers = Batch(*(torch.clone(part) for part in first[:7]), first.scale)
    plan, out = buffers.plan(), torch.zeros_like(first.query)
    kernel().tree_attention(*buffers, out, plan=plan)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(buffers.row_start, buffers.context)
        kernel().tree_attention(*buffers, out, plan=plan)
    for batch in (second, first):
        for buffer, part in zip(buffers[:7], batch[:7], strict=True):
            buffer.copy_(part)
        graph.replay()
        assert (out.double() - batch.expected()).abs().max() < ERROR[torch.float32]


@pytest.mark.skipif(DEVICE != "cuda" or not importlib.util.find_spec("xformers"), reason="no GPU or no xformers")
@pytest.mark.parametrize("nodes", [63, 64, 100])
def test_xformers_agrees(nodes):
    """A second opinion, which shares no code with the reference."""
    from benchmarks.gpu import attention

    batch = attention.Batch.of(attention.random_trees(3, nodes), 500)
    found, other = attention.kernel_calls(batch)[0](), attention.xformers_calls(batch)[0]()
    assert (found.double() - other.double()).abs().max() < ERROR[torch.bfloat16]
    assert attention.error(batch, found) < max(2 * attention.error(batch, other), 1e-3)


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
