"""Trees of one shape: the shapes themselves, and their children by kind."""

import math
from collections import Counter
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from tests.oracles.growth import Recorder, as_the_engine, grow, models_of
from vllm_adaptive_tree.acceptance import Kind
from vllm_adaptive_tree.proposers import StaticTree
from vllm_adaptive_tree.proposers.children import draw_children
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.testing.drafts import keyed
from vllm_adaptive_tree.testing.models import Path, ToyDrafter, ToyLM
from vllm_adaptive_tree.testing.well_formed import paths_of
from vllm_adaptive_tree.trees import Shape

KINDS: tuple[Kind, ...] = ("one_hot", "without_replacement", "iid", "hub_pair", "top_k_plus_one")
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
EAGLE_1 = [
    *["0", "1", "2", "3"],
    *["00", "01", "02", "10", "11", "20", "21", "30"],
    *["000", "001", "002", "010", "011", "020", "021", "100"],
    *["0000", "0001", "0002"],
    *["00000", "00001"],
]


# -- what the engine asks


@EVERY_KIND
def test_a_budget_values_sampled_children_by_their_place(kind):
    assert StaticTree(Shape.k_config([2, 1]), kind=kind).by_place == (kind != "one_hot")
    assert not OptTree(max_depth=2, threshold=0.0).by_place


def test_the_mask_is_known_beforehand():
    """Over what the draft reads: the root and the inner nodes."""
    mask = StaticTree(Shape.k_config([2, 2, 1])).mask(6)
    assert mask.upto(0).tolist() == [[True]]
    assert mask.upto(1).tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert OptTree(max_depth=2, threshold=0.0).mask(6) is None


def test_a_proposal_of_a_fixed_width():
    proposal = grow(StaticTree(Shape.k_config([2, 1])), models_of(4, 3, 2), nodes=4)
    padded = proposal.padded(6)
    assert torch.equal(padded.tree.cut(torch.full((2,), 4)).tokens[:, :4], proposal.tree.tokens)
    assert [column[:, 4:].tolist()[0] for column in padded.tree] == [[-1] * 2, [-1] * 2, [0] * 2, [-math.inf] * 2]
    assert padded.read.tolist() == [[*row, -1, -1] for row in proposal.read.tolist()]
    assert padded.num_planned.tolist() == [[*row, 0, 0] for row in proposal.num_planned.tolist()]


# -- shapes


def test_eagle_1():
    shape = Shape.named("eagle1", 60)
    assert ["".join(map(str, path)) for path in shape.paths] == EAGLE_1
    assert (len(shape), shape.depth, shape.max_children) == (25, 5, 4)


@pytest.mark.parametrize(("name", "children"), [("binary", 2), ("ternary", 3)])
def test_full_trees(name, children):
    for depth in (1, 2, 3, 4):
        nodes = sum(children**level for level in range(1, depth + 1))
        full = Shape.named(name, nodes)
        assert (len(full), full.depth, full.max_children) == (nodes, depth, children)
        every = {path for level in range(1, depth + 1) for path in product(range(children), repeat=level)}
        assert set(full.paths) == every
        assert Shape.named(name, nodes - 1) == full.cut(nodes - 1)
        assert Shape.named(name, nodes + 1).depth == depth + 1


@pytest.mark.parametrize(
    ("widths", "sizes"),
    [((4, 2, 2, 1), [4, 8, 16, 16]), ((4, 2, 2, 1, 1), [4, 8, 16, 16, 16]), ((1, 1, 3, 1), [1, 1, 3, 3]), ((5,), [5])],
)
def test_k_configs(widths, sizes):
    shape = Shape.k_config(widths)
    levels = Counter(len(path) for path in shape.paths)
    assert [levels[depth] for depth in range(1, len(widths) + 1)] == sizes
    assert len(shape) == sum(sizes)
    for path in ((), *shape.paths):
        assert shape.num_children(path) == (widths[len(path)] if len(path) < len(widths) else 0)
    # level order: child c of the node with local index j is the node j * k + c of its level
    for depth, width in enumerate(widths, start=1):
        level = [path for path in shape.paths if len(path) == depth]
        above = [path for path in shape.paths if len(path) == depth - 1] or [()]
        assert level == [(*above[place // width], place % width) for place in range(len(level))]


def test_the_usual_k_config_has_44_nodes():
    assert len(Shape.k_config((4, 2, 2, 1))) == 44
    assert len(Shape.k_config((4, 2, 2, 1, 1))) == 60


def test_paths_in_any_order():
    assert Shape.of([[1, 0], [1], [0], (0, 0)]).paths == ((0,), (1,), (0, 0), (1, 0))


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [1, 0]], r"\[1, 0\] has no parent \[1\]; add it"),
        ([[0, 0]], r"\[0, 0\] has no parent \[0\]; add it"),
        ([[0], [2]], r"\[2\] needs its earlier sibling \[1\]; add it"),
        ([[0], [0, 1]], r"\[0, 1\] needs its earlier sibling \[0, 0\]; add it"),
        ([[0], [0]], r"\[0\] is empty or listed twice"),
        ([[0], []], r"\[\] is empty or listed twice"),
    ],
)
def test_a_shape_with_a_hole_is_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        Shape.of(paths)


def test_a_cut_keeps_the_first_nodes_in_level_order():
    shape = Shape.named("eagle1", 25)
    for nodes in range(1, 30):
        assert shape.cut(nodes).paths == shape.paths[:nodes]
    assert shape.cut(4).depth == 1


# -- trees


def ranked(model: ToyLM, shape: Shape) -> list[Path]:
    """The shape with each node's best tokens."""
    best: dict[tuple[int, ...], Path] = {(): ()}
    for ranks in shape.paths:
        above = best[ranks[:-1]]
        tokens = model.logits[model.history(above)].sort(descending=True).indices.tolist()
        if ranks[-1] < len(tokens):
            best[ranks] = (*above, tokens[ranks[-1]])
    return [best[ranks] for ranks in shape.paths]


RANKS = ["0", "1", "2", "00", "01", "10", "20", "21", "000", "010", "011", "210"]
EAGLE_ISH = Shape.of(tuple(map(int, ranks)) for ranks in RANKS)


def test_the_best_tokens():
    models = models_of(5, 3, 12)
    proposal = grow(StaticTree(EAGLE_ISH, kind="one_hot"), models, nodes=12)
    for model, tree, weights in zip(models, paths_of(proposal), proposal.tree.log_weight.tolist(), strict=True):
        assert tree == ranked(model, EAGLE_ISH)
        assert weights == pytest.approx([math.log(model.probability(path)) for path in tree], abs=1e-12)


@EVERY_KIND
def test_greedy_requests_get_the_best_tokens_whatever_the_kind(kind):
    models = models_of(5, 3, 6)
    shape = Shape.k_config((2, 2, 1))
    flags = [True, False] * 3
    mixed = paths_of(grow(StaticTree(shape, kind=kind), models, nodes=10, greedy=flags))
    sampled = paths_of(grow(StaticTree(shape, kind=kind), models, nodes=10))
    best = [ranked(model, shape) for model in models]
    for r, greedy in enumerate(flags):
        assert mixed[r] == (best[r] if greedy else sampled[r])
    assert (sampled == best) == (kind == "one_hot")


@EVERY_KIND
def test_every_tree_has_the_shape(kind):
    shape = Shape.k_config((2, 2, 2)) if kind == "hub_pair" else EAGLE_ISH
    tree, *_ = proposal = grow(StaticTree(shape, kind=kind), models_of(5, 3, 12), nodes=14)
    paths_of(proposal)
    slots = {path: slot for slot, path in enumerate(((), *shape.paths))}
    parent = [slots[path[:-1]] - 1 for path in shape.paths]
    assert tree.tokens.shape == (12, len(shape))
    assert tree.valid.all()
    assert (tree.parent == torch.tensor(parent)).all()


def siblings(tree: list[Path], parents: list[int]) -> dict[int, list[int]]:
    """Node -> its children's tokens, in generation order."""
    found: dict[int, list[int]] = {}
    for path, parent in zip(tree, parents, strict=False):
        found.setdefault(parent, []).append(path[-1])
    return found


@pytest.mark.parametrize("kind", ["without_replacement", "hub_pair", "top_k_plus_one"])
def test_siblings_differ(kind):
    shape = Shape.k_config((2, 2, 2) if kind == "hub_pair" else (3, 2, 2))
    tree = grow(StaticTree(shape, kind=kind), models_of(4, 3, 24), nodes=30).tree
    for paths, parents in zip(grown_anyhow(tree), tree.parent.tolist(), strict=True):
        assert all(len(set(tokens)) == len(tokens) for tokens in siblings(paths, parents).values())


def grown_anyhow(tree) -> list[list[Path]]:
    rows = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parent.tolist(), strict=True):
        paths: list[Path] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        rows.append(paths)
    return rows


def test_a_hub_pair_always_holds_the_hub():
    models = models_of(4, 3, 24)
    proposal = grow(StaticTree(Shape.k_config((2, 2, 2)), kind="hub_pair"), models, nodes=14)
    hub_first = Counter()
    for model, paths, parents in zip(models, paths_of(proposal), proposal.tree.parent.tolist(), strict=True):
        for parent, pair in siblings(paths, parents).items():
            above = paths[parent] if parent >= 0 else ()
            hub = model.probs[model.history(above)].argmax().item()
            assert len(pair) == 2
            assert hub in pair
            hub_first[pair[0] == hub] += 1
    assert min(hub_first.values()) > 20, "in both orders"


@pytest.mark.parametrize("shape", [Shape.k_config((4, 3)), EAGLE_ISH])
def test_top_k_plus_one_samples_the_first_child_and_chooses_the_others(shape):
    models = models_of(6, 3, 24)
    proposal = grow(StaticTree(shape, kind="top_k_plus_one"), models, nodes=16)
    beyond = 0
    for model, paths, parents in zip(models, paths_of(proposal), proposal.tree.parent.tolist(), strict=True):
        for parent, (sampled, *best) in siblings(paths, parents).items():
            above = paths[parent] if parent >= 0 else ()
            order = model.logits[model.history(above)].sort(descending=True).indices.tolist()
            assert best == order[: len(best)]
            assert sampled in order[len(best) :]
            beyond += sampled != order[len(best)]
    assert beyond > 20


def test_independent_draws_keep_duplicates_as_nodes_of_their_own():
    models = models_of(3, 2, 24)
    proposal = grow(StaticTree(Shape.k_config((3, 2)), kind="iid"), models, nodes=9)
    doubled = 0
    for paths, parents in zip(paths_of(proposal), proposal.tree.parent.tolist(), strict=True):
        assert len(paths) == 9
        assert parents == [-1, -1, -1, 0, 0, 1, 1, 2, 2]
        doubled += len(set(paths[:3])) < 3
    assert doubled > 10


# -- the law of the children

Pairs = dict[tuple[int, ...], float]


def pair_law(kind: Kind, q: list[float]) -> Pairs:
    """The law of two children (three for `top_k_plus_one`) of a node, by definition."""
    tokens = range(len(q))
    by_q = sorted(tokens, key=lambda token: -q[token])
    hub = by_q[0]
    match kind:
        case "one_hot":
            return {tuple(by_q[:2]): 1.0}
        case "iid":
            return {(a, b): q[a] * q[b] for a, b in product(tokens, tokens)}
        case "without_replacement":
            return {(a, b): q[a] * q[b] / (1 - q[a]) for a, b in permutations(tokens, 2)}
        case "hub_pair":
            first = {(x, hub): q[x] for x in tokens if x != hub}
            return first | {(hub, x): q[hub] * q[x] / (1 - q[hub]) for x in tokens if x != hub}
        case "top_k_plus_one":
            left = 1 - q[by_q[0]] - q[by_q[1]]
            return {(x, *by_q[:2]): q[x] / left for x in by_q[2:]}


def assert_law(found: Counter, expected: Pairs) -> None:
    count = sum(found.values())
    assert set(found) <= set(expected)
    for outcome, probability in expected.items():
        slack = 5 * math.sqrt(count * probability * (1 - probability)) + 1e-9
        assert abs(found[outcome] - count * probability) <= slack, outcome


@EVERY_KIND
def test_children_follow_the_draft_s_law_at_its_temperature(kind):
    model, requests = ToyLM.random(4, 0, seed=1, scale=1.0), 4000
    width = 3 if kind == "top_k_plus_one" else 2
    drafter = ToyDrafter([model] * requests)
    tree = grow(
        StaticTree(Shape.k_config((width,)), kind=kind), [model] * requests, nodes=3, temperature=0.7, drafter=drafter
    ).tree
    q = (model.logits[0] / 0.7).softmax(-1).tolist()
    assert_law(Counter(map(tuple, tree.tokens.tolist())), pair_law(kind, q))


def test_nodes_of_a_level_and_levels_are_drawn_independently():
    """All histories have one law; then any two nodes of the tree are independent draws from it."""
    law = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    model, requests = ToyLM(law.log().expand(1 + 3, -1)), 3000
    tree = grow(StaticTree(Shape.k_config((2, 1)), kind="iid"), [model] * requests, nodes=4).tree
    both = pair_law("iid", law.tolist())
    for a, b in ((0, 1), (2, 3), (0, 2), (1, 2)):
        assert_law(Counter(map(tuple, tree.tokens[:, [a, b]].tolist())), both)


@EVERY_KIND
def test_a_node_gets_as_many_children_as_were_planned(kind):
    q = ToyLM.random(5, 0, seed=0).probs.expand(1, 4, -1)
    planned = torch.tensor([[2, 0, 1, 2]])
    tokens = draw_children(kind, q, planned, 2, keyed(1).fold_in(torch.arange(4)[None]), None)
    assert torch.equal(tokens >= 0, torch.arange(2) < planned[..., None])


# -- what a proposal says of itself


@EVERY_KIND
@pytest.mark.parametrize("options", [{}, {"agree": as_the_engine}])
def test_read_and_drawn(kind, options):
    models = models_of(5, 3, 6)
    shape = Shape.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0], [1, 0, 0], [1, 0, 1]])
    levels: list[Tensor] = []
    proposal = grow(StaticTree(shape, kind=kind), models, nodes=8, keep=levels.append, **options)
    said = torch.cat(levels, 1)
    fanout = [shape.num_children(path) for path in ((), *shape.paths)]
    for r, (model, tree) in enumerate(zip(models, paths_of(proposal), strict=True)):
        assert proposal.num_planned[r].tolist() == fanout
        for path, number, planned in zip(tree, proposal.read[r].tolist(), fanout[1:], strict=True):
            assert (number >= 0) == (planned > 0)
            if number >= 0:
                assert torch.equal(said[r, number], model.logits[model.history(path)])


@pytest.mark.parametrize("nodes", range(1, 15))
@pytest.mark.parametrize("kind", ["one_hot", "without_replacement", "iid"])
def test_a_smaller_budget_cuts_the_shape(kind, nodes):
    """Also far below the depth for which the proposer was made."""
    models = models_of(4, 3, 6)
    proposer = StaticTree(Shape.k_config((2, 2, 2)), kind=kind)
    full = paths_of(grow(proposer, models, nodes=14))
    for options in ({}, {"agree": as_the_engine}):
        assert paths_of(grow(proposer, models, nodes=nodes, **options)) == [tree[:nodes] for tree in full]


# -- fewer tokens than children


@EVERY_KIND
@pytest.mark.parametrize("greedy", [False, True])
def test_children_that_the_vocabulary_lacks_are_missing_and_parents_stay_right(kind, greedy):
    models = models_of(2, 3, 12)
    shape = Shape.k_config((3, 3, 1))
    recorder = Recorder(models)
    proposal = grow(StaticTree(shape, kind=kind), models, nodes=21, greedy=greedy, drafter=recorder)
    for tree in paths_of(proposal):  # parents and depths, empty slots behind
        if kind == "iid" and not greedy:
            assert len(tree) == 2 + 4 + 4  # no more children than tokens, though they may be equal
        else:
            above = [path for path in tree if len(path) < 3]
            assert set(above) == {path for depth in (1, 2) for path in product(range(2), repeat=depth)}
            assert len(tree) == len(set(tree)) == 2 + 4 + 4
    counts = proposal.num_planned[:, 1:].masked_fill(~proposal.tree.valid, 0)
    assert torch.equal(proposal.num_planned[:, 1:], counts), "nothing is drawn below a missing node"


@EVERY_KIND
def test_columns_that_are_cut_off_change_nothing(kind):
    models = models_of(2, 4, 8)
    proposer = StaticTree(Shape.k_config((3, 3, 2, 2)), kind=kind)
    cut, whole = Recorder(models), Recorder(models)
    levels: list[Tensor] = []
    ours = grow(proposer, models, nodes=200, drafter=cut, agree=as_the_engine, keep=levels.append)
    theirs = grow(proposer, models, nodes=200, drafter=whole)
    assert paths_of(ours) == paths_of(theirs)
    assert torch.equal(ours.num_planned, theirs.num_planned)
    assert all(a < b for a, b in zip(cut.widths, whole.widths, strict=True))
    said = torch.cat(levels, 1)
    for r, (model, tree) in enumerate(zip(models, paths_of(ours), strict=True)):
        for path, number in zip(tree, ours.read[r].tolist(), strict=False):
            if number >= 0:
                assert torch.equal(said[r, number], model.logits[model.history(path)])


def test_tokens_without_mass_are_never_drafted():
    logits = ToyLM.random(4, 2, seed=0).logits
    logits[:, 1:3] = -torch.inf
    model = ToyLM(logits)
    for kind in ("one_hot", "without_replacement", "iid"):
        (tree,) = paths_of(grow(StaticTree(Shape.k_config((3, 3)), kind=kind), [model], nodes=12))
        assert {token for path in tree for token in path} <= {0, 3}
        assert kind == "iid" or sorted(tree) == [(0,), (0, 0), (0, 3), (3,), (3, 0), (3, 3)]


@EVERY_KIND
def test_a_request_in_a_batch_is_drawn_as_if_alone(kind):
    models = models_of(4, 3, 6)
    proposer = StaticTree(Shape.k_config((2, 2, 1)), kind=kind)
    together = paths_of(grow(proposer, models, nodes=10))
    assert together == [paths_of(grow(proposer, [m], nodes=10, rng=keyed([r])))[0] for r, m in enumerate(models)]
