"""Allocation of a batch's verified nodes to its trees."""

import random
from itertools import product

import pytest
import torch

from tests.pure.budget import curve
from tests.pure.budget.test_cost import random_curve
from vllm_adaptive_tree.budget import allocate, top_nodes
from vllm_adaptive_tree.budget.cost import profiled_rows

LINEAR = curve((1, 3.0), (101, 13.0))


def chains(generator: random.Random, requests: int, nodes: int) -> list[list[float]]:
    """Values that fall along each list; some lists are shorter."""
    rows = []
    for _ in range(requests):
        length = generator.randint(0, nodes)
        rows.append([*sorted((generator.random() for _ in range(length)), reverse=True), *[0.0] * (nodes - length)])
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_a_given_number_of_nodes(seed):
    """Those of the largest values, of each list the first; places without a node fill up what the nodes leave."""
    generator = random.Random(seed)
    rows = chains(generator, 4, 5)
    room = [generator.randint(0, 5) for _ in rows]
    values = torch.tensor(rows).log()
    for most in range(sum(room) + 1):
        kept = top_nodes(values, torch.tensor(room), most).tolist()
        assert sum(kept) == most
        assert all(count <= limit for count, limit in zip(kept, room, strict=True))
        inside = sorted((value for row, limit in zip(rows, room, strict=True) for value in row[:limit]), reverse=True)
        taken = sorted((value for row, count in zip(rows, kept, strict=True) for value in row[:count]), reverse=True)
        assert taken == inside[:most]


def test_equal_values_are_shared_out():
    assert top_nodes(torch.zeros(3, 4), torch.tensor([4, 4, 2]), 7).tolist() == [3, 2, 2]
    assert top_nodes(torch.tensor([[0.5, 0.9], [0.6, 0.1]]), torch.tensor([2, 2]), 2).tolist() == [1, 1]


@pytest.mark.parametrize("rows", [0, 7])
@pytest.mark.parametrize("seed", range(40))
def test_deterministic_children_bring_the_most_for_their_price(seed, rows):
    generator = random.Random(seed)
    trees, cost, price = chains(generator, 3, 3), random_curve(generator), generator.uniform(0.2, 3)
    kept = allocate(torch.tensor(trees), verify=cost, price=price, rows=rows).tolist()

    def profit(lengths: tuple[int, ...]) -> float:
        gain = sum(sum(tree[:length]) for tree, length in zip(trees, lengths, strict=True))
        return gain - price * cost.cost(rows + 3 + sum(lengths))

    every = product(*(range(1 + sum(value > 0 for value in tree)) for tree in trees))
    assert profit(kept) == pytest.approx(max(map(profit, every)))


@pytest.mark.parametrize("seed", range(40))
def test_sampled_children_stop_at_the_first_node_that_is_worth_too_little(seed):
    """Of each tree, whatever the others and the rows cost."""
    generator = random.Random(seed)
    trees, least = chains(generator, 3, 4), generator.choice([0.0, generator.random()])
    kept = [sum(value >= max(least, 1e-9) for value in tree) for tree in trees]
    assert allocate(torch.tensor(trees), verify=LINEAR, price=9.0, least=least).tolist() == kept
    most = generator.randrange(12)
    assert int(allocate(torch.tensor(trees), verify=LINEAR, price=9.0, least=least, most=most).sum()) == min(
        most, sum(kept)
    )


def test_a_step_after_a_tile_is_a_reason_to_stop_there():
    cost = curve(*((rows, 1.0 if rows <= 16 else 1.2) for rows in profiled_rows(64)))
    assert int(allocate(torch.full((8, 4), 0.05), verify=cost, price=8.0).sum()) == 8


@pytest.mark.parametrize("least", [None, 0.0])
def test_at_no_price_the_best_of_all_are_taken(least):
    value = torch.tensor([[0.9, 0.8, 0.7, 0.6], [0.75, 0.5, 0.0, 0.0], [0.1, 0.1, 0.1, 0.0]])
    for most, kept in ((4, [3, 1, 0]), (None, [4, 2, 3])):
        assert allocate(value, verify=LINEAR, price=0.0, least=least, most=most).tolist() == kept


def test_free_rows_are_all_taken_and_dear_ones_are_not():
    values = torch.tensor([[0.5, 0.4, 0.0], [0.9, 0.01, 0.001]])
    free, dear = curve((1, 1.0), (100, 1.0)), curve((1, 1.0), (2, 2.0), (100, 100.0))
    assert allocate(values, verify=free, price=1.0).tolist() == [2, 3]
    assert allocate(values, verify=dear, price=1.0).tolist() == [0, 0]


def test_a_node_counts_for_no_more_than_the_one_before():
    values = torch.tensor([[0.1, 0.9], [0.5, 0.4]])
    cost = curve((1, 1.0), (100, 20.0))
    assert (
        allocate(values, verify=cost, price=1.0).tolist()
        == allocate(torch.tensor([[0.1, 0.1], [0.5, 0.4]]), verify=cost, price=1.0).tolist()
    )


def test_more_requests_get_fewer_nodes_each():
    """The price is what such a batch brings."""
    sizes = []
    for requests in (1, 2, 8, 32):
        values = (0.7 ** torch.arange(1, 21)).expand(requests, 20)
        kept = allocate(values, verify=LINEAR, price=2 * requests / LINEAR.cost(2 * requests))
        sizes.append(float(kept.mean()))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] > 0
