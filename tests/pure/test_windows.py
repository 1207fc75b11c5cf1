"""Windows, soft-caps and sinks over trees: the dense reference against chains, and a CPU's attention against it."""

import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.attention import reference
from vllm_adaptive_tree.attention.cpu import attend, context_bias, window_bias
from vllm_adaptive_tree.trees.masks import ancestor_bits, ancestor_mask

PARENTS = [-1, 0, 0, 1, 3, 2, -1, 6, 7, 4]
CONTEXTS = (0, 5, 37)
OPTIONS = [
    {"window": 1},
    {"window": 3},
    {"window": 20},
    {"window": 500},
    {"soft_cap": 2.0},
    {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
    {"window": 4, "soft_cap": 1.5, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
]
HEADS, KV_HEADS, SIZE, BLOCK, SCALE = 4, 2, 16, 8, 0.4


def batch(parents: list[int], length: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Query [rows, H, D]; key and value [length + rows, Hkv, D]; float64."""
    generator = torch.Generator().manual_seed(seed)
    rows = 1 + len(parents)
    shapes = (rows, HEADS, SIZE), *[(length + rows, KV_HEADS, SIZE)] * 2
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def by_reference(query: Tensor, key: Tensor, value: Tensor, bits: Tensor, length: int, **options: object) -> Tensor:
    blocks = -(-len(key) // BLOCK)
    cache = torch.zeros(2, blocks * BLOCK, KV_HEADS, SIZE, dtype=torch.float64)
    cache[0, : len(key)], cache[1, : len(key)] = key, value
    keys, values = cache.unflatten(1, (blocks, BLOCK))
    table, start = torch.arange(blocks)[None], torch.tensor([0, len(query)])
    where = keys, values, table, start, torch.tensor([length]), bits
    return reference.tree_attention(query, *where, SCALE, torch.zeros_like(query), **options)  # type: ignore[arg-type]


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, places: list[int], window: int, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    """[H, D]: the query at the end of a path through `places`, in plain sums."""
    out = []
    for head in range(HEADS):
        k, v = (part[places, head // (HEADS // KV_HEADS)][-window or None :] for part in (key, value))
        score = k @ query[head] * SCALE
        score = soft_cap * torch.tanh(score / soft_cap) if soft_cap else score
        weight = score.exp()
        total = weight.sum() + (0 if sinks is None else sinks[head].double().exp())
        out.append(weight @ v / total)
    return torch.stack(out)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("length", CONTEXTS)
def test_every_row_attends_as_the_end_of_its_path(options: dict[str, object], length: int) -> None:
    query, key, value = batch(PARENTS, length)
    found = by_reference(query, key, value, ancestor_bits(torch.tensor([PARENTS]))[0], length, **options)
    for row in range(len(query)):
        path, node = [], row - 1
        while node >= 0:
            path.append(length + 1 + node)
            node = PARENTS[node]
        places = [*range(length + 1), *reversed(path)]
        one = {"window": 0, "soft_cap": 0.0, "sinks": None, **options}
        assert torch.allclose(found[row], one_by_one(query[row], key, value, places, **one), atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_cpu_attends_as_the_reference(options: dict[str, object]) -> None:
    """Requests of unequal lengths in one batch, their contexts padded."""
    width, rows = max(CONTEXTS) + 3, 1 + len(PARENTS)
    queries, keys, values, expected = [], [], [], []
    bits = ancestor_bits(torch.tensor([PARENTS]))[0]
    for seed, length in enumerate(CONTEXTS):
        query, key, value = batch(PARENTS, length, seed)
        expected.append(by_reference(query, key, value, bits, length, **options))
        queries.append(query)
        for whole, part in ((keys, key), (values, value)):
            padding = torch.full((width - length, KV_HEADS, SIZE), 9.0)
            whole.append(torch.cat([part[:length], padding, part[length:]]).transpose(0, 1))
    mask = ancestor_mask(torch.tensor([PARENTS] * len(CONTEXTS)))
    lengths = torch.tensor(CONTEXTS)
    before = context_bias(lengths, width).expand(-1, rows, -1)
    bias = torch.cat([before, torch.where(mask, 0.0, -torch.inf)], 2)
    more = dict(options)
    if window := more.pop("window", 0):
        position = lengths[:, None] + mask.sum(2) - 1
        places = torch.cat([torch.arange(width).expand(len(CONTEXTS), -1), position], 1)
        bias = window_bias(bias, position, places, window)  # type: ignore[arg-type]
    found = attend(
        torch.stack(queries).float(), torch.stack(keys).float(), torch.stack(values).float(), bias, SCALE, **more
    )  # type: ignore[arg-type]
    assert torch.allclose(found.double(), torch.stack(expected), atol=1e-5)


def test_a_window_by_slots_is_another_one() -> None:
    """Result of a mask of the last slots: siblings push each other's ancestors out."""
    query, key, value = batch(PARENTS, 5)
    bits = ancestor_bits(torch.tensor([PARENTS]))[0]
    right = by_reference(query, key, value, bits, 5, window=4)
    last = 5 + 1 + len(PARENTS)
    node = len(PARENTS)  # its ancestors are 4, 3, 1, 0: rows 5, 4, 2, 1
    seen = [place for place in range(last - 4, last) if place < 5 or place - 5 in (0, 1, 2, 4, 5, node)]
    wrong = one_by_one(query[node], key, value, seen, 0, 0.0, None)
    assert not torch.allclose(right[node], wrong, atol=1e-3)
