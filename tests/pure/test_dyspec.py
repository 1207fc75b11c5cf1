"""DySpec (arXiv 2410.11744) against its two algorithms in plain Python, with the same draws at every node."""

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from tests.oracles.growth import PathNoise, Recorder, as_the_engine, grow, models_of
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.dyspec import DySpec
from vllm_adaptive_tree.testing.drafts import keyed
from vllm_adaptive_tree.testing.models import Path, ToyLM
from vllm_adaptive_tree.testing.well_formed import paths_of

Slots = list[tuple[float, Path]]  # slot value and the path of the node that fills it, in generation order

COUNT = 18
SETTINGS = [  # V, nodes, depth, children: 7 x 18 runs
    (2, 6, 5, 2),
    (3, 1, 4, 3),
    (3, 9, 4, 3),
    (3, 60, 3, 3),  # more than there are
    (4, 12, 4, 2),
    (4, 25, 4, 4),
    (6, 20, 3, 5),
]
TEMPERATURE = 0.6


class Toy:
    """Distributions of the draft, and the order in which its tokens are drawn, as plain numbers."""

    def __init__(self, model: ToyLM, draws: dict[int, list[int]]):
        self.history, self.draws = model.history, draws
        self.rows = (model.logits / TEMPERATURE).softmax(-1).tolist()

    def law(self, path: Path) -> list[float]:
        return list(self.rows[self.history(path)])

    def order(self, path: Path) -> list[int]:
        return self.draws[self.history(path)]


def algorithm_1(toy: Toy, *, nodes: int, max_depth: int, max_children: int) -> Slots:
    """A fixed budget: always the most valuable slot of the heap."""
    heap: list[tuple[float, Path, int]] = [(-1.0, (), 0)]  # -value, node above, earlier siblings
    residuals: dict[Path, list[float]] = {}
    slots: Slots = []
    while heap and len(slots) < nodes:
        minus, above, rank = heapq.heappop(heap)
        residual = residuals.setdefault(above, toy.law(above))
        y = toy.order(above)[rank]
        slots.append((-minus, (*above, y)))
        if rank + 1 < min(max_children, len(toy.order(above))):
            heapq.heappush(heap, (minus * (1 - residual[y]), above, rank + 1))
        if len(above) + 1 < max_depth:
            heapq.heappush(heap, (minus * residual[y], (*above, y), 0))
        residuals[above] = without(residual, y)
    return slots


def algorithm_2(toy: Toy, *, threshold: float, nodes: int, max_depth: int, max_children: int) -> Slots:
    """Layer by layer every slot worth the threshold; then the budget, in slot order."""
    leaves: list[tuple[Path, float]] = [((), 1.0)]
    slots: Slots = []
    for _ in range(max_depth):
        below = []
        for above, reach in leaves:
            value, residual, tokens = reach, toy.law(above), toy.order(above)[:max_children]
            while value >= threshold and tokens:
                y = tokens.pop(0)
                slots.append((value, (*above, y)))
                below.append(((*above, y), value * residual[y]))
                value *= 1 - residual[y]
                residual = without(residual, y)
        leaves = [(path, value) for path, value in below if value >= threshold]
    return sorted(slots, key=lambda slot: -slot[0])[:nodes]


def without(residual: list[float], y: int) -> list[float]:
    left = [0.0 if x == y else share for x, share in enumerate(residual)]
    return [share / (sum(left) or 1.0) for share in left]


def law(model: ToyLM, path: Path) -> Tensor:
    return (model.logits[model.history(path)] / TEMPERATURE).softmax(-1)


def laws(models: Sequence[ToyLM]) -> Tensor:
    return torch.stack([(model.logits / TEMPERATURE).softmax(-1) for model in models])


def slots_of(proposal: Proposal) -> list[Slots]:
    weights = proposal.tree.log_weight.exp().tolist()
    return [list(zip(weights[r][: len(tree)], tree, strict=True)) for r, tree in enumerate(paths_of(proposal))]


def assert_same(ours: Slots, theirs: Slots) -> None:
    assert [path for _, path in ours] == [path for _, path in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-12)


@pytest.mark.parametrize(("vocabulary", "nodes", "depth", "children"), SETTINGS)
def test_without_a_threshold_it_is_the_heap(vocabulary, nodes, depth, children):
    models = models_of(vocabulary, depth, COUNT)
    recorder, rng = Recorder(models), keyed(COUNT)
    proposer = DySpec(max_depth=depth, max_children=children, threshold=0)
    slots = slots_of(grow(proposer, models, nodes=nodes, temperature=TEMPERATURE, rng=rng, drafter=recorder))
    draws = recorder.draws(rng, laws(models))  # of the nodes that were read; the heap opens no other
    for ours, model, drawn in zip(slots, models, draws, strict=True):
        assert_same(ours, algorithm_1(Toy(model, drawn), nodes=nodes, max_depth=depth, max_children=children))


@pytest.mark.parametrize(("vocabulary", "nodes", "depth", "children"), SETTINGS)
@pytest.mark.parametrize("threshold", [0.01, 0.1, 0.4])
def test_with_a_threshold_it_is_algorithm_2(threshold, vocabulary, nodes, depth, children):
    models = models_of(vocabulary, depth, COUNT)
    rng = PathNoise(Recorder(models), COUNT)
    limits = {"max_depth": depth, "max_children": children}
    proposer = DySpec(**limits, threshold=threshold)
    slots = slots_of(grow(proposer, models, nodes=nodes, temperature=TEMPERATURE, rng=rng, drafter=rng.recorder))
    for ours, model, drawn in zip(slots, models, rng.draws(laws(models)), strict=True):
        assert_same(ours, algorithm_2(Toy(model, drawn), threshold=threshold, nodes=nodes, **limits))


def forest(**options: float) -> tuple[list[ToyLM], Proposal]:
    models = models_of(4, 4, COUNT)
    proposer = DySpec(max_depth=4, max_children=4, threshold=options.get("threshold", 0.0))
    return models, grow(proposer, models, nodes=30, temperature=TEMPERATURE)


def test_a_slot_is_worth_the_path_above_and_the_rejection_of_its_earlier_siblings():
    models, proposal = forest()
    for model, slots in zip(models, slots_of(proposal), strict=True):
        siblings: dict[Path, list[int]] = {}
        for value, (*above, token) in slots:
            earlier = siblings.setdefault(tuple(above), [])
            reach = math.prod(law(model, tuple(above[:depth]))[x].item() for depth, x in enumerate(above))
            left = 1 - sum(law(model, tuple(above))[x].item() for x in earlier)
            assert value == pytest.approx(reach * left, abs=1e-12)
            earlier.append(token)


def test_invariants_of_the_slots():
    models, proposal = forest()
    for model, slots in zip(models, slots_of(proposal), strict=True):
        values = [value for value, _ in slots]
        assert all(a >= b for a, b in pairwise(values)), "popped in falling order"
        at = {path: value for value, path in slots}
        assert len(at) == len(slots), "siblings differ"
        assert all(at[path] <= at[path[:-1]] + 1e-12 for path in at if len(path) > 1)
        assert values[0] == 1
        for above in {path[:-1] for path in at}:
            assert sum(law(model, above)[path[-1]].item() for path in at if path[:-1] == above) <= 1 + 1e-12


def test_a_lower_threshold_only_adds_slots():
    models = models_of(4, 3, 12)
    before: list[set[Path]] = [set() for _ in models]
    sizes = []
    for threshold in (0.9, 0.5, 0.2, 0.05, 0.01, 0.0):
        rng = PathNoise(Recorder(models), len(models))
        proposer = DySpec(max_depth=3, max_children=4, threshold=threshold)
        trees = [set(tree) for tree in paths_of(grow(proposer, models, nodes=84, rng=rng, drafter=rng.recorder))]
        assert all(small <= large for small, large in zip(before, trees, strict=True))
        before, sizes = trees, [*sizes, sum(map(len, trees))]
    assert len(set(sizes)) == len(sizes), "every threshold made a difference"
    assert sizes[-1] == 12 * (4 + 16 + 64)


@pytest.mark.parametrize("threshold", [0.0, 0.03, 0.3])
def test_one_draft_forward_for_each_level(threshold):
    depths = set()
    for seed, model in enumerate(models_of(3, 6, COUNT)):
        recorder = Recorder([model])
        proposer = DySpec(max_depth=6, max_children=3, threshold=threshold)
        proposal = grow(proposer, [model], nodes=14, rng=keyed([seed]), drafter=recorder, agree=as_the_engine)
        depths.add(int(proposal.tree.depth.max()))
        assert 1 + len(recorder.widths) == proposal.tree.depth.max()
    assert len(depths) > 2


@pytest.mark.parametrize("options", [{}, {"agree": as_the_engine}])
@pytest.mark.parametrize("threshold", [0.0, 0.1])
def test_requests_do_not_see_each_other(threshold, options):
    models = models_of(3, 5, 6)
    temperature = [1.0, 0.6, 0.3, 2.0, 0.7, 1.0]
    proposer = DySpec(max_depth=5, max_children=3, threshold=threshold)
    together = slots_of(grow(proposer, models, nodes=9, temperature=temperature, **options))
    for r, (model, t) in enumerate(zip(models, temperature, strict=True)):
        alone = grow(proposer, [model], nodes=9, temperature=t, rng=keyed([r]), **options)
        assert_same(together[r], slots_of(alone)[0])
    assert len({len(tree[-1][1]) for tree in together}) > 1


def test_every_node_that_was_read_planned_the_most_children():
    models = models_of(4, 4, COUNT)
    for children, planned in ((3, 3), (16, 4)):
        proposer = DySpec(max_depth=4, max_children=children, threshold=0)
        _, read, drawn, *_ = proposal = grow(proposer, models, nodes=12)
        assert (drawn[:, 0] == planned).all()
        assert torch.equal(drawn[:, 1:], torch.where(read > 0, planned, 0))
        for r, paths in enumerate(paths_of(proposal)):
            inner = {path[:-1] for path in paths}
            assert all(read[r, node] > 0 for node, path in enumerate(paths) if path in inner)
            assert max(sum(path[:-1] == above for path in paths) for above in inner) <= planned


def test_the_law_of_a_node_is_what_the_draft_said_at_its_number():
    models = models_of(3, 4, COUNT)
    for options in ({}, {"agree": as_the_engine}):
        levels: list[Tensor] = []
        proposer = DySpec(max_depth=4, max_children=3, threshold=0.02)
        proposal = grow(proposer, models, nodes=20, keep=levels.append, **options)
        said = torch.cat(levels, 1)
        for r, paths in enumerate(paths_of(proposal)):
            for path, number in zip(paths, proposal.read[r].tolist(), strict=False):
                if number >= 0:
                    assert torch.equal(said[r, number], models[r].logits[models[r].history(path)])


def test_greedy_requests_are_sampled_too():
    """The paper's setting; one-hot children would need another rule."""
    models = models_of(4, 4, COUNT)
    proposer = DySpec(max_depth=4, max_children=4, threshold=0)
    greedy, sampled = (grow(proposer, models, nodes=9, greedy=flag) for flag in (True, False))
    assert paths_of(greedy) == paths_of(sampled)
    first = [tree[0][0] for tree in paths_of(greedy)]
    assert first != [model.probs[0].argmax().item() for model in models]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_keeps_parents_and_earlier_siblings_in_front(dtype):
    """The last tokens of a law weigh as much as their slot or, rounded, a little more."""
    models = [ToyLM.random(5, 3, seed=seed, scale=2.0 + seed, dtype=dtype) for seed in range(COUNT)]
    rng = PathNoise(Recorder(models), COUNT)
    proposer = DySpec(max_depth=3, max_children=5, threshold=0)
    proposal = grow(proposer, models, nodes=155, temperature=TEMPERATURE, rng=rng, drafter=rng.recorder)
    for tree, model, drawn in zip(paths_of(proposal), models, rng.draws(laws(models)), strict=True):
        for above in {path[:-1] for path in tree}:
            siblings = [path[-1] for path in tree if path[:-1] == above]
            assert siblings == drawn[model.history(above)][: len(siblings)]


@pytest.mark.parametrize("nodes", range(1, 6))
def test_certain_tokens_grow_a_chain(nodes):
    """q == 1.0 makes a child's slot as valuable as its parent's; the parent comes first all the same."""
    logits = ToyLM.random(3, 5, seed=0).logits
    logits.scatter_(1, logits.argmax(1, keepdim=True), 1e4)
    for threshold in (0.0, 1.0):
        proposer = DySpec(max_depth=5, max_children=3, threshold=threshold)
        (tree,) = paths_of(proposal := grow(proposer, [ToyLM(logits)], nodes=nodes))
        assert [len(path) for path in tree] == list(range(1, nodes + 1))
        assert proposal.tree.log_weight.exp().tolist() == [[1.0] * nodes]


def test_flat_laws_are_held_by_the_cap_on_children():
    """The slot value does not contain the token's own probability, and with 64 equal ones it hardly falls."""
    model = ToyLM(torch.zeros(1 + 64, 64, dtype=torch.float64))
    for cap in (2, 7):
        (tree,) = paths_of(grow(DySpec(max_depth=2, max_children=cap, threshold=0), [model], nodes=30))
        assert sum(len(path) == 1 for path in tree) == cap
        assert len(tree) == min(30, cap + cap * cap)


@pytest.mark.parametrize(("start", "scale"), [*product([0.5, 1e-3], [1.0, 3.0])])
def test_steering_fills_three_quarters_of_the_budget(start, scale):
    models = [ToyLM.random(4, 3, seed=seed, scale=scale) for seed in range(16)]
    proposer = DySpec(max_depth=4, max_children=4, threshold=start)
    fills = []
    for step in range(45):
        rng = keyed(range(16 * step, 16 * step + 16))
        tree = grow(proposer, models, nodes=32, rng=rng, agree=as_the_engine).tree
        fills.append(tree.valid.double().mean().item())
        proposer.steer(fills[-1])
    assert abs(fills[0] - 0.75) > 0.15, "it had something to do"
    assert sum(fills[-20:]) / 20 == pytest.approx(0.75, abs=0.05)


def test_the_threshold_stays_within_its_limits():
    proposer = DySpec(max_depth=4, max_children=4, threshold=0.02)
    for fill, limit in ((1.0, 0.9), (0.0, 1e-6)):
        for _ in range(100):
            proposer.steer(fill)
        assert proposer.threshold == limit
