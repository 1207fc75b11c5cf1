"""A verification of random trees on vLLM's CPU kernels, against masked attention in float64, and its commit."""

from dataclasses import dataclass, field
from itertools import chain
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.forward_context import override_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from tests.oracles.trees import random_tree
from vllm_adaptive_tree.engine.cpu_cache import gather_context
from vllm_adaptive_tree.engine.v1.attention import VerifyAttention, VerifyMetadata
from vllm_adaptive_tree.engine.v1.drafts import Draft
from vllm_adaptive_tree.engine.v1.scratch import ScratchBlocks
from vllm_adaptive_tree.engine.v1.verification import Verification
from vllm_adaptive_tree.trees import TokenTree

BLOCK, HEADS, KV_HEADS, DIM = 32, 4, 2, 32
SCALE = DIM**-0.5
ISA = "vec"
QUANTITIES = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
LAYERS = {"first": KV_HEADS, "second": KV_HEADS, "other": 1}
"""The third layer's blocks are half as long, so its scratch blocks begin elsewhere."""


class Native:
    """vLLM's implementation of a layer, without an engine around it."""

    scale = SCALE

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, native: Any, out: Tensor, *_: Any
    ) -> Tensor:
        ops.cpu_attention_with_kv_cache(
            query,
            *halves(cache),
            out,
            native.query_start_loc,
            native.seq_lens,
            SCALE,
            True,
            None,
            -1,
            native.block_table,
            0.0,
            native.scheduler_metadata,
            None,
            **QUANTITIES,
        )
        return out

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(key, value, *halves(cache), slots, ISA, **QUANTITIES)


def halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    blocks, heads, size, both = cache.shape
    key, value = cache.view(blocks, heads, 2 * size, both // 2).chunk(2, dim=2)
    return key, value


@dataclass
class Builder:
    kv_heads: int
    block_size: int = BLOCK

    def build(self, common_prefix: int, common: Any) -> CPUAttentionMetadata:
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=common.num_reqs,
            num_heads=HEADS,
            num_kv_heads=self.kv_heads,
            head_dim=DIM,
            seq_lens=common.seq_lens,
            dtype=torch.float32,
            query_start_loc=common.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=ISA,
            enable_kv_split=True,
            kv_cache_dtype="auto",
        )
        return CPUAttentionMetadata(
            common.num_actual_tokens,
            common.max_query_len,
            common.query_start_loc,
            common.max_seq_len,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            schedule,
        )


@dataclass
class Batch:
    """Requests with a context in the cache, each with a root and the rows of a tree, or with some rows of a prompt."""

    trees: dict[int, TokenTree]
    plain: dict[int, int]  # request -> rows
    computed: list[int]
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for request in range(len(self.computed)):
            self.starts.append(sum(self.counts))
            self.counts.append(1 + len(self.trees[request]) if request in self.trees else self.plain[request])

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def sees(self, row: int) -> tuple[int, list[int]]:
        """The request of a row, and the rows of the batch that it sees behind the context."""
        request = max(r for r, start in enumerate(self.starts) if start <= row)
        start, own = self.starts[request], row - self.starts[request]
        if request not in self.trees:
            return request, list(range(start, row + 1))
        path = [] if own == 0 else self.trees[request].path_to(self.order(request)[own - 1])
        return request, self.rows_of(request, path)

    def order(self, request: int) -> list[int]:
        """Nodes in the order of their rows."""
        return list(chain.from_iterable(self.trees[request].branches()))

    def rows_of(self, request: int, path: list[int]) -> list[int]:
        """Rows of the root and of a path."""
        start, order = self.starts[request], self.order(request)
        return [start, *(start + 1 + order.index(node) for node in path)]


def random_batch(seed: int) -> Batch:
    random = Random(seed)
    computed = [random.choice([1, 5, 29, 30, 31, 32, 33, 61, 70]) for _ in range(5)]
    trees = {r: random_tree(random.randint(6, 12), vocabulary=3, seed=10 * seed + r) for r in (0, 1, 3)}
    trees[4] = TokenTree.chain([1, 2, 3])
    return Batch(trees, {2: random.randint(1, 40)}, computed)


class Caches:
    """All layers in one allocation, layer by layer, as vLLM lays them out; and the contexts in them."""

    def __init__(self, batch: Batch, scratch: ScratchBlocks):
        width = 5
        self.table = 1 + torch.randperm(width * len(batch.computed)).view(-1, width).int()
        blocks = 1 + self.table.numel()
        pages = {name: heads * BLOCK * 2 * DIM * 4 for name, heads in LAYERS.items()}
        size = blocks * sum(pages.values())
        config = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=size, block_stride=p) for p in pages.values()])
        longer = scratch.extended(config)
        assert {tensor.size for tensor in config.kv_cache_tensors} == {size}, "the scheduler's stays as it is"
        (whole,) = {tensor.size for tensor in longer.kv_cache_tensors}
        memory, at = torch.randn(whole // 4), 0
        self.layers, self.caches = {}, {}
        self.contexts: dict[str, list[Tensor]] = {}
        for name, heads in LAYERS.items():
            shape = (blocks, heads, BLOCK, 2 * DIM)
            cache = memory[at : at + blocks * pages[name] // 4].view(shape)
            at += blocks * pages[name] // 4
            layer = SimpleNamespace(layer_name=name, isa=ISA, kv_cache=cache, impl=Native())
            VerifyAttention.adopt(layer)
            self.layers[name] = layer
            scratch.begin_cache({name: cache})
            for request, length in enumerate(batch.computed):
                key, value = torch.randn(2, length, heads, DIM)
                layer.impl.do_kv_cache_update(layer, key, value, cache, self.slots(request, range(length)))
                self.contexts.setdefault(name, []).append(torch.stack([key, value]))

    def slots(self, request: int, positions: range) -> Tensor:
        at = torch.tensor(positions)
        return self.table[request, at // BLOCK].long() * BLOCK + at % BLOCK

    def read(self, name: str, request: int, length: int) -> Tensor:
        """[2, length, Hkv, D]: what stands in the slots."""
        found = gather_context(self.layers[name].kv_cache, self.table[request : request + 1], ISA)
        return torch.stack([one[0, :, :length].transpose(0, 1) for one in found])


def expected(batch: Batch, name: str, caches: Caches, query: Tensor, new: Tensor) -> Tensor:
    results = []
    for row in range(batch.rows):
        request, seen = batch.sees(row)
        key, value = torch.cat([caches.contexts[name][request], new[:, seen]], 1).double()
        groups = HEADS // LAYERS[name]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        weights = (torch.einsum("hd,lhd->hl", query[row].double(), key) * SCALE).softmax(-1)
        results.append(torch.einsum("hl,lhd->hd", weights, value))
    return torch.stack(results).float()


@pytest.mark.parametrize("blocks", [200, 2])
@pytest.mark.parametrize("seed", range(12))
def test_every_row_sees_its_path_and_commit_puts_it_in_place(seed: int, blocks: int) -> None:
    torch.manual_seed(seed)
    batch, scratch = random_batch(seed), ScratchBlocks(blocks)
    caches = Caches(batch, scratch)
    drafts = {row: Draft(tree, None, [], [], 1.0) for row, tree in batch.trees.items()}
    step = Verification(drafts, batch.starts, batch.counts, batch.computed, vocabulary=0)
    slots = torch.cat([caches.slots(r, range(c, c + batch.counts[r])) for r, c in enumerate(batch.computed)])
    new, rounds = {}, []
    for name, heads in LAYERS.items():
        layer = caches.layers[name]
        native = SimpleNamespace(slot_mapping=slots, block_table=caches.table)
        metadata = step.metadata(Builder(heads), [name], native, scratch)
        assert isinstance(metadata, VerifyMetadata)
        rounds.append(len(metadata.rounds))
        query, out = torch.randn(2, batch.rows, HEADS, DIM)
        key, value = new[name] = torch.randn(2, batch.rows, heads, DIM)
        with override_forward_context(SimpleNamespace(attn_metadata={name: metadata})):
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)  # vLLM's own, before it attends
        found = layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, out)
        assert (found - expected(batch, name, caches, query, new[name])).abs().max() < 1e-5
    assert (max(rounds) > 1) == (blocks == 2), "few blocks: several rounds"

    random = Random(seed)
    paths = [[] if r not in batch.trees else random_path(batch.trees[r], random) for r in range(len(batch.computed))]
    nodes = torch.tensor([[*path, *[-1] * (13 - len(path))] for path in paths])
    step.commit(nodes, caches.layers)
    for name in LAYERS:
        for request, length in enumerate(batch.computed):
            start, end = batch.starts[request], batch.starts[request] + batch.counts[request]
            kept = batch.rows_of(request, paths[request]) if request in batch.trees else list(range(start, end))
            whole = torch.cat([caches.contexts[name][request], new[name][:, kept]], 1)
            assert torch.equal(caches.read(name, request, length + len(kept)), whole)


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_a_tree_come_depth_first(seed: int) -> None:
    """Its tokens and positions move there, and the target's logits stay in generation order."""
    batch = random_batch(seed)
    drafts = {row: Draft(tree, None, [], [], 1.0) for row, tree in batch.trees.items()}
    step = Verification(drafts, batch.starts, batch.counts, batch.computed, vocabulary=0)
    linear = [range(computed, computed + count) for computed, count in zip(batch.computed, batch.counts, strict=True)]
    tokens, positions = np.arange(batch.rows, dtype=np.int32), torch.tensor(list(chain.from_iterable(linear)))
    logits_rows = torch.tensor(
        [
            row
            for request, (start, count) in enumerate(zip(batch.starts, batch.counts, strict=True))
            for row in range(start if request in batch.trees else start + count - 1, start + count)
        ]
    )
    before = positions.clone()
    step.write_rows(tokens, positions, logits_rows)
    for request, tree in batch.trees.items():
        rows = batch.rows_of(request, list(range(len(tree))))
        start = batch.starts[request]
        assert tokens[rows].tolist() == list(range(start, start + len(rows)))
        assert positions[rows].tolist() == [batch.computed[request] + depth for depth in (0, *tree.depths)]
        begin = sum(1 + len(batch.trees[r]) if r in batch.trees else 1 for r in range(request))
        assert logits_rows[begin : begin + len(rows)].tolist() == rows
        assert [step.row_of(request, node) for node in range(-1, len(tree))] == rows
    (plain,) = batch.plain
    rows = list(range(batch.starts[plain], batch.starts[plain] + batch.counts[plain]))
    assert tokens[rows].tolist() == rows
    assert torch.equal(positions[rows], before[rows])


def random_path(tree: TokenTree, random: Random) -> list[int]:
    """From the root some way down to a leaf."""
    leaf = random.choice(sorted(set(range(len(tree))) - set(tree.parents)))
    return tree.path_to(leaf)[: random.randint(0, tree.depths[leaf])]
