"""Kept contexts against a paged cache of plain lists: whatever the batch does, a level reads its request's tokens."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.engine.common.attention import DraftKeys
from vllm_adaptive_tree.engine.common.contexts import PagedContexts
from vllm_adaptive_tree.engine.v1 import contexts
from vllm_adaptive_tree.engine.v1.contexts import KeptContexts

HEADS, DIM, LAYERS = 2, 3, ("first", "second")


def keys(request: str, start: int, end: int, layer: str) -> Tensor:
    """[tokens, Hkv, D]: a request's own numbers, exact in float32."""
    first = 1000 * int(request) + 100_000 * LAYERS.index(layer)
    return (first + torch.arange(start, end).float())[:, None, None].expand(-1, HEADS, DIM).clone()


class Cache:
    """A layer whose `gather` makes up what the paged cache would hold."""

    def __init__(self, name: str):
        self.layer_name, self.impl, self.gathered = name, self, 0
        self.requests: list[str] = []  # a request's block table holds its number

    def gather(self, layer: Any, kv_cache: Any, table: Tensor) -> tuple[Tensor, Tensor]:
        self.gathered += len(table)
        width = 8 * table.shape[1]
        both = torch.stack([keys(str(int(row[0])), 0, width, self.layer_name).transpose(0, 1) for row in table])
        return both, -both


def read(kept: KeptContexts, items: list[tuple[int, str, int, int]]) -> None:
    """Keep tokens as `ModelDrafter.catch_up` does: row, request, start and end of each."""
    row = np.concatenate([np.full(end - start, at) for at, _, start, end in items])
    position = np.concatenate([np.arange(start, end) for _, _, start, end in items])
    places = kept.places(row, position, [(at, start, end) for at, _, start, end in items])
    if places is not None:
        for layer in LAYERS:
            new = torch.cat([keys(name, start, end, layer) for _, name, start, end in items])
            kept.write(layer, places, new, -new)


def check(kept: KeptContexts, caches: list[Cache], items: list[tuple[int, str, int, int]], widths: list[int]) -> None:
    """Levels of `widths` nodes on these requests see their own context, the nodes before and themselves."""
    rows, ends = [at for at, *_ in items], [end for *_, end in items]
    table = torch.tensor([[int(name)] * -(-max(ends) // 8) for _, name, _, _ in items])
    state = DraftKeys(kept.of(rows, ends, table, 8), torch.tensor(ends))
    nodes = 0
    for width in widths:
        state.open_level(torch.zeros(len(items), width, dtype=torch.int64))
        for cache in caches:
            new = torch.arange(nodes, nodes + width).float().repeat(len(items))[:, None, None].expand(-1, HEADS, DIM)
            key, value = state.read(cache, None, new, -new)
            assert torch.equal(key, -value)
            assert key.isfinite().all(), "a column that no row sees would still spoil its sum"
            assert key.shape[2] == state.bias.shape[2]
            for r, (_, name, _, end) in enumerate(items):
                seen = key[r, :, (state.bias[r] == 0).any(0)]
                context = keys(name, 0, end, cache.layer_name).transpose(0, 1)
                own = new[:width].transpose(0, 1)  # parent 0: each node sees the root's context and itself
                assert torch.equal(seen, torch.cat([own, context], 1))
        nodes += width


@pytest.mark.parametrize("seed", range(12))
def test_a_batch_that_comes_and_goes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "LARGE", 1 << 10)
    generator, kept, caches = random.Random(seed), KeptContexts(), [Cache(name) for name in LAYERS]
    kept.most = 8 * 1024 if seed % 2 else 16 * 2048  # odd ones: most batches with a long request are not kept
    lengths: dict[str, int] = {}
    batch: list[str] = []
    sizes, born = set(), 0
    for step in range(60):
        for name in [one for one in batch if generator.random() < 0.1]:
            batch.remove(name)
        while len(batch) < (12 if 20 <= step < 40 else 4) and generator.random() < 0.6:
            born += 1
            batch.append(str(born))
            lengths[str(born)] = generator.choice([0, 0, 9])  # a prefix hit
        if generator.random() < 0.2:
            generator.shuffle(batch)
        if not batch:
            continue
        kept.follow(batch)
        items = []
        for row, name in enumerate(batch):
            start = lengths[name]
            end = start + generator.choice([1, 2, 5, 40 if generator.random() < 0.9 else 400])
            if generator.random() < 0.15:  # it rests; the target goes on, and the draft catches up later or not at all
                lengths[name] = end if generator.random() < 0.5 else start
                continue
            items.append((row, name, start, end))
            lengths[name] = end - 1  # the root is read again
        if not items:
            continue
        read(kept, items)
        if step % 3:
            check(kept, caches, items, generator.choice([[1], [3, 4], [2, 9, 25]]))
            sizes.add((kept.rows, kept.tokens))
    assert len({rows for rows, _ in sizes}) > 1
    assert len({tokens for _, tokens in sizes}) > 1
    assert all(rows * tokens <= kept.most for rows, tokens in sizes)
    assert kept.room > contexts.ROOM, "no tree was wider than the room"


def test_it_is_copied_out_of_the_cache_once() -> None:
    kept, caches = KeptContexts(), [Cache(name) for name in LAYERS]
    for step in range(10):
        kept.follow(["7", "8"])
        items = [(0, "7", 20 + step, 22 + step), (1, "8", 30 + 2 * step, 33 + 2 * step)]
        read(kept, items)
        check(kept, caches, items, [2, 2])
    assert [cache.gathered for cache in caches] == [2, 2]


def test_nothing_is_kept_before_the_first_second_level() -> None:
    kept = KeptContexts()
    kept.follow(["1"])
    assert kept.places(np.array([0]), np.array([5]), [(0, 5, 6)]) is None
    assert not kept.layers


def test_another_request_may_have_an_old_name() -> None:
    kept, caches = KeptContexts(), [Cache(name) for name in LAYERS]
    for requests in (["7", "8"], ["7"]):
        kept.follow(requests)
        items = [(row, name, 20, 22) for row, name in enumerate(requests)]
        read(kept, items)
        check(kept, caches, items, [2, 2])
        kept.forget({"7"})
    assert [cache.gathered for cache in caches] == [3, 3], "the new one's first 20 tokens are its own"


def test_memory_shrinks_behind_a_burst() -> None:
    kept, caches = KeptContexts(), [Cache(name) for name in LAYERS]
    many = [str(one) for one in range(1, 33)]
    kept.most = 32 * 1024
    kept.follow(many)
    items = [(row, name, 0, 900) for row, name in enumerate(many)]
    read(kept, items)
    check(kept, caches, items, [2])
    large = kept.layers["first"].numel()
    for end in (40, 41, 42):
        kept.follow(["50"])
        items = [(0, "50", 0 if end == 40 else end - 2, end)]
        read(kept, items)
        check(kept, caches, items, [2])
    assert kept.layers["first"].numel() < large / 8


def test_a_batch_that_is_too_large_is_read_from_the_paged_cache() -> None:
    """One long request makes every row long; once it has ended, contexts are kept again."""
    kept, caches = KeptContexts(), [Cache(name) for name in LAYERS]
    kept.begin_cache(blocks=5_000, block_size=8)
    assert kept.most == 20_000, "half of the cache"
    for names, ends in ((["1", "2"], [30, 40]), (["1", "2"], [30, 11_000]), (["1"], [31])):
        kept.follow(names)
        items = [(row, name, max(end - 2, 0), end) for row, (name, end) in enumerate(zip(names, ends, strict=True))]
        read(kept, items)
        check(kept, caches, items, [2, 2])
        assert bool(kept.layers) == (max(ends) < 2_500)
    kept.follow(["1"])
    items = [(0, "1", 29, 19_000)]
    read(kept, items)
    check(kept, caches, items, [2, 2])
    assert (kept.rows, kept.tokens) == (1, 19_200), "one long request is kept, without spare rows"
    # twice two rows at the first batch, at both levels of the second, and the row that is left
    assert [cache.gathered for cache in caches] == [2 + 2 * 2 + 1] * 2


def test_paged_contexts_are_the_same() -> None:
    cache, table = Cache("first"), torch.tensor([[3, 3], [4, 4]])
    paged = PagedContexts(table, 8)
    key, value = paged.open(SimpleNamespace(layer_name="first", impl=cache), None)
    assert key.shape == (2, HEADS, paged.room + 16, DIM)
    assert not key[:, :, : paged.room].any()
    assert torch.equal(key[1, :, paged.room :], keys("4", 0, 16, "first").transpose(0, 1))
    assert torch.equal(value, -key)


def test_what_is_kept_is_finite() -> None:
    """The mask that hides a column from another branch, or another request, adds -inf to NaN."""
    kept, cache = KeptContexts(), Cache("first")
    kept.follow(["0"])
    state = DraftKeys(kept.of([0], [4], torch.tensor([[0]]), 8), torch.tensor([4]))
    new = torch.full((2, HEADS, DIM), torch.nan)
    state.open_level(torch.zeros(1, 2, dtype=torch.int64))
    state.read(cache, None, new, new)
    places = kept.places(np.zeros(2, dtype=int), np.arange(4, 6), [(0, 4, 6)])
    assert places is not None
    kept.write("first", places, new, torch.full_like(new, torch.inf))
    assert kept.layers["first"].isfinite().all()
