"""Adaptive trees: the table of acceptance, what it learns from, and the trees that follow from it."""

import json

import numpy as np
import pytest
import torch

from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.proposers import Steered, adaptive_tree
from vllm_adaptive_tree.proposers.acceptance_table import (
    DEPTHS,
    EDGES,
    LEAST,
    MOST,
    RANKS,
    SHAPE,
    AcceptanceTable,
    count,
    rising,
)
from vllm_adaptive_tree.proposers.adaptive_tree import AdaptiveTree
from vllm_adaptive_tree.testing.drafts import keyed, propose
from vllm_adaptive_tree.testing.models import ToyDrafter, ToyLM

GREEDY, CHOSEN, COOL, WARM, HOT = range(SHAPE[0])


def one(value: float) -> torch.Tensor:
    return torch.tensor([value])


def test_a_cell_is_of_class_depth_rank_and_conditional_probability():
    table = AcceptanceTable()
    temperature = torch.tensor([0.6, 1.0, 0.3, 0.7, 1.0])
    greedy = torch.tensor([True, False, False, False, False])
    chosen = torch.tensor([True, True, False, False, False])
    conditional = torch.tensor([0.0, 0.3, 0.95, 0.005, 1.0, 0.5]).expand(5, 1, 6)
    for depth in (1, 2, 3, 4, 5, 9):
        cell, _ = table.look_up(table.row(temperature, greedy, chosen, depth), conditional)
        kind, group, rank, place = (torch.tensor(part) for part in np.unravel_index(cell.numpy(), SHAPE))
        assert kind[:, 0, 0].tolist() == [GREEDY, CHOSEN, COOL, WARM, HOT]
        assert group.unique().tolist() == [DEPTHS[min(depth, 5) - 1]]
        assert rank[0, 0].tolist() == [*RANKS, RANKS[-1]]
        assert place[0, 0].tolist() == [
            sum(low <= value for low in EDGES) for value in (0.0, 0.3, 0.95, 0.005, 1.0, 0.5)
        ]


def test_a_fresh_table_says_what_the_draft_says():
    """Of chosen children; a drawn one is accepted as often as two laws overlap, however unlikely its token."""
    chance = AcceptanceTable().chance
    assert (chance[:COOL, :, 0] == chance[:COOL, :, 3]).all()
    assert chance[CHOSEN, 0, 0, 6].item() == pytest.approx(0.55)
    assert chance[HOT, 0, :, 0].tolist() == pytest.approx([0.5, 0.3, 0.2, 0.1])
    assert (chance.diff(dim=3) >= 0).all()


def test_the_chance_is_interpolated():
    table = AcceptanceTable()
    conditional = torch.tensor([0.001, 0.0025, 0.02, 0.42, 0.9, 0.999])[:, None, None]
    rows = table.row(torch.ones(6), torch.zeros(6, dtype=torch.bool), torch.ones(6, dtype=torch.bool), 2)
    _, chance = table.look_up(rows, conditional)
    assert chance.flatten().tolist() == pytest.approx([LEAST, 0.0025, 0.02, 0.42, 0.9, MOST], abs=1e-3)


def by_hand(parents: list[int], path: list[int], ranks: list[int]) -> tuple[list[bool], list[bool]]:
    tried = []
    for node, parent in enumerate(parents):
        taken = [(ranks[other], other) for other in path if parents[other] == parent]
        tried.append((parent == -1 or parent in path) and (not taken or (ranks[node], node) <= taken[0]))
    return tried, [node in path for node in range(len(parents))]


@pytest.mark.parametrize("seed", range(20))
def test_reached_nodes(seed):
    """Children of an accepted node up to the accepted one, by rank; all of them where the path ends."""
    rng = np.random.default_rng(seed)
    parents, path = [[int(rng.integers(-1, node)) for node in range(9)] for _ in range(4)], []
    for tree in parents:
        nodes, at = [], -1
        while (below := [node for node, parent in enumerate(tree) if parent == at]) and rng.random() < 0.7:
            nodes.append(at := int(rng.choice(below)))
        path.append(nodes)
    ranks = rng.integers(0, 3, (4, 9))
    for parent, nodes, rank in zip(parents, path, ranks, strict=True):
        tried, accepted = counted(rank * SHAPE[3] + np.arange(9), parent, nodes + [-1] * (10 - len(nodes)))
        assert (tried, accepted) == by_hand(parent, nodes, rank.tolist())


def counted(cell: np.ndarray, parent: list[int], nodes: list[int]) -> tuple[list[bool], list[bool]]:
    """Nodes of a tree, each with a cell of its own or -1, that are tried and accepted."""
    trials, hits = counts = np.zeros((2, AcceptanceTable.cells), np.int64)
    assert count(cell[None], np.array([parent]), np.array([nodes]), *counts) == trials.sum() == np.count_nonzero(trials)
    return [bool(at >= 0 and trials[at]) for at in cell], [bool(at >= 0 and hits[at]) for at in cell]


def test_empty_slots_are_not_reached():
    assert counted(np.array([0, -1]), [-1, -1], [-1, -1]) == ([True, False], [False, False])


def test_children_of_an_accepted_node_without_a_cell_are_reached():
    """A look-up's node has none."""
    assert counted(np.array([0, -1, 1]), [-1, -1, 1], [1, -1]) == ([True, False, True], [False, False, False])


@pytest.mark.parametrize("seed", range(10))
def test_isotonic_regression(seed):
    """Against pooling of adjacent violators."""
    rng = np.random.default_rng(seed)
    value, weight = rng.random((3, 2, 9)), rng.random((3, 2, 9)) + 0.1
    pools = []
    for values, weights in zip(value.reshape(-1, 9), weight.reshape(-1, 9), strict=True):
        pool: list[list[float]] = []
        for mean, mass in zip(values, weights, strict=True):
            pool.append([mean, mass, 1])
            while len(pool) > 1 and pool[-2][0] >= pool[-1][0]:
                (a, m, k), (b, n, j) = pool[-2:]
                pool[-2:] = [[(a * m + b * n) / (m + n), m + n, k + j]]
        pools.append([mean for mean, _, count in pool for _ in range(count)])
    assert rising(value, weight) == pytest.approx(np.array(pools).reshape(3, 2, 9))


def observed(table: AcceptanceTable, cell: int, accepted: float, times: int = 1000) -> None:
    rng = np.random.default_rng(cell)
    for _ in range(times):
        hit = rng.random() < accepted
        table.observe(np.array([[cell]]), np.array([[-1]]), np.array([[0 if hit else -1]]))
    table.settle()


def cell_of(*index: int) -> int:
    return int(np.ravel_multi_index(index, SHAPE))


def test_it_learns_a_rate_and_shares_it():
    """With other depths, and with other temperatures of drawn children, until these have seen their own."""
    table = AcceptanceTable()
    before = table.chance.clone()
    observed(table, cell_of(HOT, 0, 0, 3), 0.9)
    after = table.chance
    assert after[HOT, 0, 0, 3].item() == pytest.approx(0.9, abs=0.06)
    assert after[HOT, 2, 0, 3] > 0.8
    assert after[WARM, 0, 0, 3] > 0.6
    assert (after[:COOL] == before[:COOL]).all()
    assert (after[HOT, :, 1:] == before[HOT, :, 1:]).all(), "other ranks"
    observed(table, cell_of(WARM, 0, 0, 3), 0.2)
    assert table.chance[WARM, 0, 0, 3].item() == pytest.approx(0.2, abs=0.06)
    assert table.chance[HOT, 0, 0, 3].item() == pytest.approx(0.9, abs=0.06)
    assert (table.chance.diff(dim=3) >= 0).all()


def test_a_better_child_is_reached_before_one_that_was_moved_ahead_of_it():
    """As the value of a slot has it: the second child counts once the first is rejected, wherever they stand."""
    first, second = cell_of(GREEDY, 0, 0, 4), cell_of(GREEDY, 0, 1, 5)
    for accepted, trials in (([0], [1, 1]), ([1], [1, 0]), ([-1], [1, 1])):
        table = AcceptanceTable()
        table.observe(np.array([[second, first]]), np.full((1, 2), -1), np.array([accepted]))
        assert table.trials.ravel()[[first, second]].tolist() == trials
        assert table.hits.sum() == (accepted != [-1])


def test_it_forgets():
    table = AcceptanceTable()
    observed(table, cell_of(HOT, 0, 0, 3), 1.0, 3000)
    observed(table, cell_of(HOT, 0, 0, 3), 0.3, 5000)
    assert table.chance[HOT, 0, 0, 3].item() == pytest.approx(0.3, abs=0.05)
    assert table.trials.max() < 1100


def test_another_process_knows_what_it_has_learnt():
    table, other = AcceptanceTable(), AcceptanceTable()
    observed(table, cell_of(COOL, 1, 1, 4), 0.4)
    other.restore(json.loads(json.dumps(table.to_json())))
    assert torch.allclose(other.chance, table.chance, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"hits": None},
        {"trials": [1.0]},
        {"hits": "many"},
        {"trials": [0.0] * AcceptanceTable.cells},
        {"hits": [float("nan")]},
    ],
)
def test_a_damaged_table_changes_nothing(change):
    table = AcceptanceTable()
    observed(table, cell_of(HOT, 0, 0, 3), 0.9)
    known = table.chance.clone()
    with pytest.raises(ValueError, match=r"numbers|missing|accepted"):
        table.restore({**table.to_json(), **change})
    assert (table.chance == known).all()


def test_a_profile_that_lacks_something_changes_nothing():
    """Of a third party's method with a table and a threshold; one without a table says what it lacks."""
    made, known = proposer(), AcceptanceTable()
    observed(known, cell_of(HOT, 0, 0, 3), 0.9)
    before, steering = made.acceptance.chance.clone(), ThresholdController(made, Steered(fill=True))
    for data in ({"acceptance": known.to_json()}, {"threshold": 0.5}, {}, None):
        with pytest.raises(ValueError, match="missing"):
            steering.restore(data)
    assert (made.acceptance.chance == before).all()
    assert made.threshold == 0
    steering.restore({"acceptance": known.to_json(), "threshold": 0.5})
    assert made.threshold == 0.5
    assert not (made.acceptance.chance == before).all()


def grown(proposer: AdaptiveTree, **how):
    model = ToyLM.random(8, 4, seed=3, scale=2.0)
    return propose(proposer, ToyDrafter([model], torch.zeros(1, dtype=torch.int64)), nodes=10, **how)


def proposer() -> AdaptiveTree:
    return AdaptiveTree(max_depth=4, max_children=4, drawn_from=0.5)


@pytest.mark.parametrize("chosen", [True, False])
def test_a_node_is_worth_what_the_table_says(chosen):
    """Parent's path, times rejections of its earlier siblings, times its own acceptance, here one a rank; at most
    what its parent and its earlier sibling are worth."""
    made = proposer()
    chance = torch.rand(SHAPE[:3], generator=torch.Generator().manual_seed(1)).clamp(0.05, 0.95)
    made.acceptance.chance.copy_(chance[..., None].expand(SHAPE))
    tree, _, _, cell, _ = grown(made, chosen=chosen)
    assert cell is not None
    chance = made.acceptance.chance.flatten()[cell[0]].double()
    children: dict[int, list[int]] = {}
    path: dict[int, float] = {-1: 1.0}
    weight: dict[int, float] = {-1: 1.0}
    for node, parent in enumerate(tree.parent[0].tolist()):
        rank = np.unravel_index(int(cell[0, node]), SHAPE)[2]
        earlier = children.setdefault(parent, [])
        if not chosen:
            assert rank == RANKS[min(len(earlier), len(RANKS) - 1)], "siblings are kept in the order drawn"
        slot = path[parent] * float(np.prod([1 - chance[other].item() for other in earlier]))
        path[node] = slot * chance[node].item()
        worth = min(path[node], weight[parent], *(weight[other] for other in earlier[-1:] if not chosen))
        weight[node] = tree.log_weight[0, node].exp().item()
        if not chosen or rank == 0:
            assert weight[node] == pytest.approx(worth, rel=1e-5)
        earlier.append(node)
    assert (tree.log_weight[0].diff() <= 0).all()
    assert tree.depth.max() > 1


def test_a_table_shapes_the_tree():
    """Where first draws are always accepted the tree is a chain as deep as it may be; where never, it is flat."""
    depths = []
    for first in (0.99, 0.01):
        made = proposer()
        made.acceptance.chance.fill_(0.3)
        made.acceptance.chance[:, :, 0] = first
        depths.append(grown(made, chosen=False).tree.depth[0].float().mean().item())
    assert depths[0] > depths[1] + 0.5


def test_chosen_children_are_the_best_tokens():
    proposal = grown(proposer(), chosen=True)
    model = ToyLM.random(8, 4, seed=3, scale=2.0)
    top = model.logits[0].topk(4).indices.tolist()
    first = [
        token
        for token, parent in zip(proposal.tree.tokens[0].tolist(), proposal.tree.parent[0].tolist(), strict=True)
        if parent < 0
    ]
    assert first == top[: len(first)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_value_does_not_see_its_own_draw_not_even_by_rounding(dtype, monkeypatch):
    """Slots after the same earlier siblings have one value, bit for bit, whatever they draw themselves."""
    seen, requests = [], 300
    monkeypatch.setattr(adaptive_tree, "best_candidates", lambda slots, nodes: seen.append(slots) or slots)
    model = ToyLM(ToyLM.random(6, 0, seed=1, scale=2.0, dtype=torch.float32).logits.to(dtype))
    made = AdaptiveTree(max_depth=1, max_children=4, drawn_from=0.0)
    made.acceptance.chance.copy_(torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)).sort(-1).values)
    drafter = ToyDrafter([model], torch.zeros(requests, dtype=torch.int64))
    propose(made, drafter, nodes=4, rng=keyed(requests), chosen=False)
    tokens, value = seen[0].tokens.tolist(), seen[0].value.tolist()
    for slot in range(4):
        values: dict[tuple[int, ...], set[float]] = {}
        draws: dict[tuple[int, ...], set[int]] = {}
        for drawn, worth in zip(tokens, value, strict=True):
            values.setdefault(tuple(drawn[:slot]), set()).add(worth[slot])
            draws.setdefault(tuple(drawn[:slot]), set()).add(drawn[slot])
        assert max(map(len, draws.values())) > 1
        assert max(map(len, values.values())) == 1


@pytest.mark.parametrize("chosen", [True, False, [True, False]])
@pytest.mark.parametrize("vocabulary", [1, 2, 8])
def test_small_vocabularies(vocabulary, chosen):
    models = [ToyLM.random(vocabulary, 3, seed=seed, scale=3.0, dtype=torch.float16) for seed in (1, 2)]
    made = AdaptiveTree(max_depth=4, max_children=16, drawn_from=0.5)
    tree, _, _, cell, _ = propose(made, ToyDrafter(models), nodes=10, chosen=chosen)
    assert cell is not None
    assert tree.valid.any(1).all()
    assert (tree.valid == (tree.log_weight > -torch.inf)).all()
    assert (tree.valid == (cell >= 0)).all()
    for tokens, parents in zip(tree.tokens.tolist(), tree.parent.tolist(), strict=True):
        nodes = [node for node in zip(tokens, parents, strict=True) if node[0] >= 0]
        assert len(set(nodes)) == len(nodes)


@pytest.mark.parametrize("temperature", [1e-6, 0.01, 100.0])
def test_extreme_temperatures(temperature):
    proposal = grown(proposer(), chosen=False, temperature=temperature)
    assert proposal.tree.valid.any()
    assert not proposal.tree.log_weight.isnan().any()
