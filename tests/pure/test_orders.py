import pytest
import torch
from torch import Tensor

from tests.oracles.trees import on_device, on_host, paths
from vllm_adaptive_tree.trees import TokenTree, TreeBatch
from vllm_adaptive_tree.trees.orders import depth_first, heavy_path, mask_blocks, permuted

from .test_no_host_sync import DEVICES, NoHostSync

ORDERS = pytest.mark.parametrize("order", [depth_first, heavy_path])


def recursive_tree(nodes: int, seed: int, *, tops: bool = True) -> TokenTree:
    """The parent of every node uniform among the earlier ones, with `tops` the root too; no two tokens are equal."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(nodes, generator=generator, dtype=torch.float64)
    parents = (uniform * (torch.arange(nodes) + tops)).long() - int(tops)
    parents[0] = -1
    return TokenTree(tuple(torch.randperm(nodes, generator=generator).tolist()), tuple(parents.tolist()))


def batch(sizes: list[int]) -> TreeBatch:
    """Random trees; the weight of a node tells which one it is."""
    tree = on_device([recursive_tree(nodes, seed) for seed, nodes in enumerate(sizes)])
    return tree._replace(log_weight=torch.where(tree.valid, -tree.tokens.float(), -torch.inf))


def visit(parents: tuple[int, ...], *, heavy: bool) -> list[int]:
    """The definition: depth first, children in generation order or by decreasing subtree size."""
    children = {node: [c for c, parent in enumerate(parents) if parent == node] for node in range(-1, len(parents))}

    def size(node: int) -> int:
        return 1 + sum(size(child) for child in children[node])

    def below(node: int) -> list[int]:
        ordered = sorted(children[node], key=size, reverse=True) if heavy else children[node]
        return [x for child in ordered for x in (child, *below(child))]

    return below(-1)


def blocks_of_mask(parents: tuple[int, ...], order: list[int], block: int) -> int:
    rank = {node: at for at, node in enumerate(order)}
    tiles = set()
    for node in order:
        at = node
        while at >= 0:
            tiles.add((rank[node] // block, rank[at] // block))
            at = parents[at]
    return len(tiles)


SIZES = [[1], [2, 1], [7, 12, 3, 12, 1], [40, 33, 64, 5], [100] * 3]


@ORDERS
@pytest.mark.parametrize("sizes", SIZES)
def test_as_defined(order, sizes):
    tree = batch(sizes)
    found = order(tree.parent, tree.valid).tolist()
    for row, one in zip(found, on_host(tree), strict=True):
        expected = visit(one.parents, heavy=order is heavy_path)
        assert row == expected + list(range(len(one), len(row)))


@ORDERS
@pytest.mark.parametrize("shape", ["chain", "star", "tops"])
def test_regular_trees(order, shape):
    parents = {"chain": range(-1, 32), "star": [-1, *[0] * 32], "tops": [-1] * 33}[shape]
    parent = torch.tensor([list(parents)])
    assert order(parent).tolist() == [list(range(33))]


def test_the_orders_differ():
    parent = torch.tensor([[-1, -1, 1, 0, 1, 2]])  # the second top node has the larger subtree
    assert depth_first(parent).tolist() == [[0, 3, 1, 2, 5, 4]]
    assert heavy_path(parent).tolist() == [[1, 2, 5, 4, 0, 3]]


@ORDERS
def test_empty_slots_may_stand_anywhere(order):
    parent = torch.tensor([[-1, -1, 0, -1, 0, 2]])
    valid = torch.tensor([[True, False, True, False, True, True]])
    assert order(parent, valid).tolist() == [[0, 2, 5, 4, 1, 3]]
    assert mask_blocks(parent, order(parent, valid), valid, block=1).item() == 1 + 2 + 3 + 2


@ORDERS
@pytest.mark.parametrize("sizes", SIZES)
def test_permuted_trees_are_the_same_trees(order, sizes):
    tree = batch(sizes)
    result = permuted(tree, order(tree.parent, tree.valid))
    for before, after in zip(on_host(tree), on_host(result), strict=True):  # parents first is checked there
        assert sorted(paths(before)) == sorted(paths(after))
    assert torch.equal(result.log_weight, torch.where(result.valid, -result.tokens.float(), -torch.inf))


@pytest.mark.parametrize("block", [1, 3, 8, 32, 64])
def test_mask_blocks_as_defined(block):
    tree = batch([40, 33, 64, 5])
    for order in (depth_first(tree.parent, tree.valid), heavy_path(tree.parent, tree.valid)):
        expected = [
            blocks_of_mask(one.parents, row[: len(one)], block)
            for one, row in zip(on_host(tree), order.tolist(), strict=True)
        ]
        assert mask_blocks(tree.parent, order, tree.valid, block=block).tolist() == expected


def mean_blocks(nodes: int, *, trees: int) -> list[float]:
    """Of random recursive trees as inserted, depth first and by heavy paths."""
    parent = torch.tensor([recursive_tree(nodes, seed, tops=False).parents for seed in range(trees)])
    inserted = torch.arange(nodes).expand_as(parent)
    return [
        mask_blocks(parent, order).double().mean().item()
        for order in (inserted, depth_first(parent), heavy_path(parent))
    ]


@pytest.mark.parametrize(
    ("nodes", "blocks"),
    [
        (256, (35.9, 22.6, 21.6)),
        (512, (134.6, 53.3, 49.6)),
        (1024, (487, 118, 111)),
        (2048, (1652, 256, 231)),
    ],
)
def test_table_5(nodes, blocks):
    """DySpec's Table 5 (b = 32), as inserted and depth first: 36 -> 22.5, 135.5 -> 52.8, 490.2 -> 119.3,
    1654.5 -> 278.7. Its random trees are not described; the expected figures are those of recursive ones.
    """
    assert mean_blocks(nodes, trees=12) == pytest.approx(blocks, rel=0.05)


@DEVICES
def test_no_host_sync(device):
    tree = TreeBatch(*(column.to(device) for column in batch([7, 12, 3])))
    results: list[Tensor] = []
    with NoHostSync():
        for order in (depth_first, heavy_path):
            ranks = order(tree.parent, tree.valid)
            results += [*permuted(tree, ranks), mask_blocks(tree.parent, ranks, tree.valid, block=4)]
    assert {result.device.type for result in results} == {device}
