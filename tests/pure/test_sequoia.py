"""Sequoia's dynamic programme (arXiv 2402.12374) against brute force and against the paper's recursion."""

import math
import time
from functools import cache

import pytest

from vllm_adaptive_tree.proposers.sequoia import sequoia_shape
from vllm_adaptive_tree.trees import Shape

VECTORS = [(0.5, 0.3), (0.9, 0.05), (0.4, 0.4), (0.48, 0.11, 0.06), (0.3, 0.25, 0.2), (0.7, 0.2, 0.1)]


def value(shape: Shape, vector: tuple[float, ...]) -> float:
    """Expected tokens of a step, the extra one included: the sum over all nodes of the chances along their paths."""
    return 1 + math.fsum(math.prod(vector[rank] for rank in path) for path in shape.paths)


def all_shapes(ranks: int, nodes: int, max_depth: int) -> set[frozenset[tuple[int, ...]]]:
    """Every shape of at most `nodes` nodes and `ranks` children of each."""
    shapes = {frozenset[tuple[int, ...]]()}
    for _ in range(nodes):
        shapes |= {
            shape | {(*above, rank)}
            for shape in shapes
            for above in ((), *shape)
            if len(above) < max_depth
            for rank in range(ranks)
            if (*above, rank) not in shape and (rank == 0 or (*above, rank - 1) in shape)
        }
    return shapes


@pytest.mark.parametrize("max_depth", [1, 2, 3, 6])
@pytest.mark.parametrize("vector", VECTORS)
def test_no_shape_is_better(vector, max_depth):
    shapes = [Shape.of(paths) for paths in all_shapes(len(vector), 6, max_depth)]
    for nodes in range(1, 7):
        best = max(value(shape, vector) for shape in shapes if len(shape) <= nodes)
        ours = sequoia_shape(vector, nodes=nodes, max_depth=max_depth)
        assert value(ours, vector) == pytest.approx(best, abs=1e-12)
        assert len(ours) <= nodes
        assert ours.depth <= max_depth


@pytest.mark.parametrize("nodes", [1, 4, 11, 20])
@pytest.mark.parametrize("max_depth", [2, 4, 8])
@pytest.mark.parametrize("vector", VECTORS)
def test_the_paper_s_recursion_has_the_same_value(vector, max_depth, nodes):
    @cache
    def g(m: int, levels: int, children: int) -> float:
        """m nodes and levels incl. the root, which has exactly so many children."""
        if children == 0:
            return 1.0 if m == 1 else -math.inf
        return max(
            (g(y, levels, children - 1) + vector[children - 1] * f(m - y, levels - 1) for y in range(1, m)),
            default=-math.inf,
        )

    @cache
    def f(m: int, levels: int) -> float:
        if levels == 0:
            return -math.inf
        return max(g(m, levels, children) for children in range(len(vector) + 1))

    possible = max(f(m, max_depth + 1) for m in range(1, nodes + 2))
    assert value(sequoia_shape(vector, nodes=nodes, max_depth=max_depth), vector) == pytest.approx(possible, abs=1e-12)


def test_the_budget_is_spent_where_there_is_room():
    assert len(sequoia_shape(VECTORS[3], nodes=20, max_depth=8)) == 20
    assert len(sequoia_shape(VECTORS[0], nodes=20, max_depth=2)) == 6
    assert sequoia_shape((0.8,), nodes=20, max_depth=5) == Shape.k_config([1] * 5)


def test_two_entries_give_a_binary_tree():
    shape = sequoia_shape((0.6, 0.3), nodes=31, max_depth=10)
    assert shape.max_children == 2
    assert len(shape) == 31


def test_a_certain_first_child_gives_a_chain_and_equal_chances_a_bush():
    assert sequoia_shape((1.0, 0.0), nodes=5, max_depth=10) == Shape.k_config([1] * 5)
    assert sequoia_shape((0.2, 0.2, 0.2, 0.2), nodes=4, max_depth=10) == Shape.k_config([4])


def test_a_deeper_or_larger_tree_is_never_worse():
    vector = VECTORS[3]
    by_depth = [value(sequoia_shape(vector, nodes=12, max_depth=depth), vector) for depth in range(1, 9)]
    by_size = [value(sequoia_shape(vector, nodes=nodes, max_depth=8), vector) for nodes in range(1, 13)]
    assert by_depth == sorted(by_depth)
    assert by_size == sorted(by_size)
    assert by_depth[0] < by_depth[3]


@pytest.mark.parametrize(("nodes", "max_depth"), [(64, 10), (256, 32)])
def test_a_large_budget_takes_no_time(nodes, max_depth):
    vector = [0.48, *(0.22 / rank for rank in range(2, 17))]
    start = time.process_time()
    shape = sequoia_shape(vector, nodes=nodes, max_depth=max_depth)
    assert time.process_time() - start < 2
    assert len(shape) == nodes
