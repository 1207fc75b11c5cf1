"""Trees with continuations of the text merged into them, against plain dictionaries."""

import math
import random
from typing import Any

import pytest
import torch

from tests.oracles import merging as oracle
from vllm_adaptive_tree.drafters import Continuations
from vllm_adaptive_tree.proposers import Proposal, merging, merging_cpu
from vllm_adaptive_tree.proposers.merging import GOES_ON
from vllm_adaptive_tree.trees import TreeBatch
from vllm_adaptive_tree.trees.tree_batch import EMPTY_SLOT

VOCABULARY, NODES, DEPTH, LENGTH, CHAINS = 3, 6, 3, 4, 3
ANY = 99  # number of children

Path = tuple[int, ...]


def in_tensors(proposal: Proposal, continuations: Continuations, *, nodes: int, most: int = ANY) -> Proposal:
    return merging.merge(proposal, continuations, nodes=nodes, most=most, max_depth=DEPTH)


def compiled(proposal: Proposal, continuations: Continuations, *, nodes: int, most: int = ANY) -> Proposal:
    return merging_cpu.merge(proposal, continuations, nodes=nodes, most=most)


BOTH = pytest.mark.parametrize("merge", [in_tensors, compiled])


def random_tree() -> dict[Path, float]:
    """Path -> log value, in an order with parents first."""
    found: dict[Path, float] = {}
    for _ in range(random.randrange(NODES + 1)):
        parent = random.choice([(), *found])
        path = (*parent, random.randrange(VOCABULARY))
        if len(path) <= DEPTH and path not in found:
            found[path] = found.get(parent, 0.0) - random.random()
    return found


def as_tensors(trees: list[dict[Path, float]]) -> Proposal:
    rows, read, planned = [], [], []
    for tree in trees:
        paths = list(tree)
        nodes = [(path[-1], paths.index(path[:-1]) if path[:-1] else -1, len(path), tree[path]) for path in paths]
        rows.append(nodes + [EMPTY_SLOT] * (NODES - len(nodes)))
        read.append([10 + at for at in range(len(nodes))] + [-1] * (NODES - len(nodes)))
        planned.append([1, *(20 + at for at in range(len(nodes))), *[0] * (NODES - len(nodes))])
    columns = [torch.tensor([[node[at] for node in row] for row in rows]) for at in range(4)]
    return Proposal(TreeBatch(*columns), torch.tensor(read), torch.tensor(planned))


def as_paths(tree: TreeBatch, row: int) -> list[Path]:
    paths: list[Path] = []
    tokens = zip(tree.tokens[row].tolist(), tree.parent[row].tolist(), tree.depth[row].tolist(), strict=True)
    for token, parent, depth in tokens:
        if token >= 0:
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            assert len(paths[-1]) == depth
    return paths


@BOTH
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("nodes", [2, NODES, 12])
def test_the_best_of_both(seed: int, nodes: int, merge: Any) -> None:
    random.seed(seed)
    trees = [random_tree() for _ in range(3)]
    tokens = [[[random.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(CHAINS)] for _ in trees]
    weight = torch.rand(len(trees), CHAINS, generator=torch.Generator().manual_seed(seed)) / CHAINS
    for row in tokens:
        for at, chain in enumerate(row):
            end = random.randrange(LENGTH + 1)
            row[at] = chain[:end] + [-1] * (LENGTH - end)
    given = as_tensors(trees)
    given = given._replace(cell=torch.where(given.read >= 0, 20 + given.read, -1))
    found = Continuations(torch.tensor(tokens), weight)
    merged = merge(given, found, nodes=nodes)
    for row, tree in enumerate(trees):
        shares: dict[Path, float] = {}
        for chain, share in zip(tokens[row], weight[row].tolist(), strict=True):
            chain = [token for token in chain if token >= 0]
            for end in range(1, len(chain) + 1):
                path = tuple(chain[:end])
                shares[path] = shares.get(path, 0.0) + share
        worth = dict(tree)
        for path, share in shares.items():
            own = math.log(share) + (len(path) - 1) * math.log(GOES_ON)
            worth[path] = max(worth.get(path, -math.inf), own)
        paths = as_paths(merged.tree, row)
        assert len(set(paths)) == len(paths) == min(nodes, len(worth))
        values = merged.tree.log_weight[row, : len(paths)].tolist()
        assert values == pytest.approx([worth[path] for path in paths], abs=1e-5)
        assert values == pytest.approx(sorted(worth.values(), reverse=True)[:nodes], abs=1e-5)
        drafted = list(tree)
        read = [10 + drafted.index(path) if path in tree else -1 for path in paths]
        assert merged.read[row, : len(paths)].tolist() == read
        assert merged.cell is not None
        cells = [30 + drafted.index(path) if path in tree else -1 for path in paths]
        assert merged.cell[row].tolist() == cells + [-1] * (merged.cell.shape[1] - len(cells))
        assert merged.chosen is not None
        flags = [worth[path] > tree.get(path, -math.inf) for path in paths]
        assert merged.chosen[row, : len(paths)].tolist() == flags
        planned = [20 + drafted.index(path) if path in tree else 0 for path in paths]
        assert merged.num_planned[row, : 1 + len(paths)].tolist() == [1, *planned]
        levels = merging.draft_levels(merged.tree, found)[row].tolist()
        assert levels == merging_cpu.draft_levels(merged.tree, found)[row].tolist()
        assert levels == [0 if path in shares else len(path) for path in paths] + [0] * (len(levels) - len(paths))


@BOTH
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_all_at_once_as_one_token_after_another(seed: int, length: int, merge: Any) -> None:
    """With equal values, continuations that nothing weighs, and nodes that are worth more than their parents."""
    random.seed(1000 * length + seed)
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    tokens = torch.randint(0, 2, (3, CHAINS + 2, length), generator=generator)
    ends = torch.randint(0, length + 1, (3, CHAINS + 2, 1), generator=generator)
    tokens = tokens.masked_fill(torch.arange(length) >= ends, -1)
    found = Continuations(tokens, torch.randint(0, 3, (3, CHAINS + 2), generator=generator) / 16)
    given = as_tensors([random_tree() for _ in range(3)])
    value = torch.where(given.tree.valid, torch.rand(3, NODES, generator=generator).log(), -torch.inf)
    given = given._replace(tree=given.tree._replace(log_weight=value))
    for nodes in (3, NODES, 20):
        one, other = merge(given, found, nodes=nodes), oracle.merge(given, found, nodes=nodes, max_depth=DEPTH)
        for got, expected in zip((*one.tree, *one[1:3]), (*other.tree, *other[1:3]), strict=True):
            torch.testing.assert_close(got, expected)


@BOTH
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_node_keeps_its_best_children(seed: int, most: int, merge: Any) -> None:
    """Of the children of a node the best stay, and what is below the others goes: at most one makes chains."""
    random.seed(seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, VOCABULARY, (4, CHAINS, LENGTH), generator=generator)
    found = Continuations(tokens, torch.randint(0, 3, (4, CHAINS), generator=generator) / 16)
    given = as_tensors([random_tree() for _ in range(4)])
    given = given._replace(cell=torch.where(given.read >= 0, 20 + given.read, -1))
    whole, cut = merge(given, found, nodes=20), merge(given, found, nodes=5, most=most)
    assert whole.cell is not None
    assert cut.cell is not None
    for row in range(4):
        kept = list[Path]()
        paths = as_paths(whole.tree, row)
        for path in paths:
            siblings = sum(other[:-1] == path[:-1] for other in kept)
            if siblings < most and (len(path) == 1 or path[:-1] in kept):
                kept.append(path)
        kept = kept[:5]
        assert as_paths(cut.tree, row) == kept
        at = [paths.index(path) for path in kept]
        for part, of_cut in ((whole.read, cut.read), (whole.cell, cut.cell), (whole.tree.log_weight, None)):
            got = (cut.tree.log_weight if of_cut is None else of_cut)[row, : len(kept)]
            assert got.tolist() == part[row, at].tolist()
        assert (cut.tree.tokens[row, len(kept) :] == -1).all()
        assert (cut.read[row, len(kept) :] == -1).all()


def test_a_table_learns_nothing_from_chosen_nodes_and_their_later_siblings() -> None:
    """Of a request whose other children are drawn; what stands before a chosen sibling still counts."""
    depth = torch.tensor([[1, 1, 1, 2, 2, 1]] * 2)
    tree = TreeBatch(depth + 4, torch.tensor([[-1, -1, -1, 1, 1, -1]] * 2), depth, -depth.float())
    chosen, cell = torch.tensor([[False, True, False, False, False, False]] * 2), torch.arange(12).view(2, 6)
    proposal = Proposal(tree, depth, torch.ones(2, 7, dtype=torch.int64), cell, chosen)
    found = merging.counted(proposal, among=torch.tensor([True, False])).cell
    assert found is not None
    assert found.tolist() == [[0, -1, -1, 3, 4, -1], cell[1].tolist()]


def test_a_drawn_token_is_not_told_from_others_by_the_text() -> None:
    """Neither is its place in the tree known before it is drawn, nor may its value in a budget be another one."""
    tokens, depth = torch.tensor([[5, 6, 7]] * 2), torch.tensor([[1, 1, 2]] * 2)
    parent, chosen = torch.tensor([[-1, -1, 0]] * 2), torch.tensor([[False, False, True]] * 2)
    proposal = Proposal(TreeBatch(tokens, parent, depth, -depth.float()), depth, torch.ones(2, 4, dtype=torch.int64))
    found = Continuations(torch.tensor([[[5, 7]]] * 2), torch.full((2, 1), 0.3))
    levels = merging.draft_levels(proposal.tree, found)
    assert levels.tolist() == [[0, 1, 0]] * 2
    own = merging.without_own_draws(levels, proposal._replace(chosen=chosen), among=torch.tensor([True, False]))
    assert own.tolist() == [[1, 1, 0], [0, 1, 0]]


@BOTH
def test_nothing_found_changes_nothing_but_the_order(merge: Any) -> None:
    random.seed(1)
    trees = [random_tree() for _ in range(4)]
    nothing = Continuations(torch.full((4, 1, 1), -1), torch.zeros(4, 1))
    merged = merge(as_tensors(trees), nothing, nodes=NODES)
    for row, tree in enumerate(trees):
        assert as_paths(merged.tree, row) == sorted(tree, key=lambda path: -tree[path])
