"""The budget: cost curves, calibration, and how a batch shares its nodes."""

import json
import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracles.drafts import cut, every_draft, stacked
from tests.oracles.models import ToyLM
from tests.oracles.steps import emitted
from vllm_adaptive_tree.budget import FREE, Calibration, Controller, Costs, Curve, Pauses, Sharpening, allocate, best
from vllm_adaptive_tree.budget.controller import DOUBT, TRIAL
from vllm_adaptive_tree.budget.cost import profiled_rows
from vllm_adaptive_tree.budget.foresight import ENOUGH, RECENT, Foresight
from vllm_adaptive_tree.budget.levels import EVERY, FIRST
from vllm_adaptive_tree.budget.pauses import LOSSES, PAUSE
from vllm_adaptive_tree.budget.sharpening import EACH, TOGETHER
from vllm_adaptive_tree.proposers import Proposer
from vllm_adaptive_tree.proposers.dyspec import DySpec
from vllm_adaptive_tree.proposers.opt_tree import OptTree


def curve(*points: tuple[float, float]) -> Curve:
    return Curve(*torch.tensor(points).double().t())


def costs(*points: tuple[float, float], **rest: Any) -> Costs:
    return Costs(curve(*points), **rest)


LINEAR = curve((1, 3.0), (101, 13.0))
PLATEAUS = curve((1, 1.0), (2, 1.0), (3, 1.6), (5, 1.6), (6, 2.6), (9, 2.7))


def random_curve(generator: random.Random) -> Curve:
    rows = sorted(generator.sample(range(1, 40), 6))
    return curve(*((x, generator.uniform(0.1, 3)) for x in rows))


# Curves.


def test_a_curve_goes_through_its_points_and_never_falls():
    made = curve((1, 2.0), (4, 1.0), (8, 5.0))
    assert made.at([1, 4, 6, 8, 10, 0]).tolist() == pytest.approx([1, 1, 3, 5, 7, 1])


@pytest.mark.parametrize("seed", range(20))
def test_no_row_counts_for_more_than_a_later_one(seed):
    made = random_curve(random.Random(seed))
    for rows in (3, 17, 30):
        made.observe(rows, 0.5)
    assert (np.diff(made.at(range(60))) >= -1e-12).all()


@pytest.mark.parametrize("seed", range(5))
def test_one_number_of_rows_costs_what_it_costs_among_others(seed):
    for made in (random_curve(random.Random(seed)), random_curve(random.Random(seed)).hull()):
        assert [made.cost(rows) for rows in range(60)] == pytest.approx(made.at(range(60)).tolist())


def test_one_slow_measurement_does_not_make_more_rows_dear():
    made, spoilt = curve((1, 1.0), (4, 1.1), (8, 1.5)), curve((1, 1.0), (2, 1.6), (4, 1.1), (8, 1.5))
    assert spoilt.at([4, 6, 8]).tolist() == pytest.approx(made.at([4, 6, 8]).tolist())
    assert spoilt.cost(2) == pytest.approx(1.1)


@pytest.mark.parametrize("seed", range(20))
def test_the_hull_is_the_largest_convex_curve_below(seed):
    made = random_curve(random.Random(seed))
    first, last = int(made.rows[0]), int(made.rows[-1])
    x = np.arange(first, last + 1)
    y, hull = made.at(x), made.hull().at(x)
    assert (hull <= y + 1e-12).all()
    assert (np.diff(hull, 2) >= -1e-12).all()
    for at in range(len(x)):  # the lowest chord over this place: no convex curve below reaches higher
        chords = [
            (y[a] * (x[b] - x[at]) + y[b] * (x[at] - x[a])) / (x[b] - x[a])
            for a in range(at)
            for b in range(at + 1, len(x))
        ]
        assert float(hull[at]) == pytest.approx(float(min([y[at], *chords])), abs=1e-12)


def test_a_curve_follows_the_measurements():
    made = curve((1, 1.0), (11, 2.0), (21, 3.0))
    for _ in range(400):
        made.observe(6, 3.0)
    assert made.cost(6) == pytest.approx(3.0, rel=1e-2)
    assert made.cost(1) == pytest.approx(2.0, rel=0.02), "both neighbours moved alike"


def test_one_stalled_step_moves_a_curve_by_little():
    made = curve((1, 1.0), (11, 2.0))
    made.observe(1, 1e9)
    assert 1 < made.cost(1) < 1.03
    before = made.cost(11)
    made.observe(11, 1e-9)
    assert 0.97 * before < made.cost(11) < before


@pytest.mark.parametrize("most", [1, 2, 5, 17, 40, 256])
def test_a_profile_looks_behind_each_tile(most):
    rows = profiled_rows(most)
    assert rows == sorted(set(rows)), "a curve wants them rising"
    assert (rows[0], rows[-1]) == (1, most)
    assert {16, 17, 32, 33, 64, 65}.intersection(range(most + 1)) <= set(rows)


def test_a_step_behind_a_tile_is_a_reason_to_stop_there():
    cost = curve(*((rows, 1.0 if rows <= 16 else 1.2) for rows in profiled_rows(64)))
    values = torch.full((8, 4), 0.05)
    assert int(allocate(values, verify=cost, spent=0.0, sampled=False).sum()) == 8


def test_a_curve_is_written_and_read():
    made = Curve.from_json(json.loads(json.dumps(PLATEAUS.to_json())))
    assert (made.rows == PLATEAUS.rows).all()
    assert (made.seconds == PLATEAUS.seconds).all()


@pytest.mark.parametrize(
    "data",
    [
        {"rows": [1, 2]},
        {"rows": [1, 2], "seconds": [1]},
        {"rows": [2, 1], "seconds": [1, 2]},
        {"rows": [1], "seconds": [1]},
        {"rows": [1, 2], "seconds": [0, 1]},
        {"rows": [1, 2], "seconds": ["fast", 1]},
        7,
    ],
)
def test_what_is_no_curve(data):
    with pytest.raises(ValueError, match="a curve"):
        Curve.from_json(data)


# Allocation.


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
        kept = best(values, torch.tensor(room), most).tolist()
        assert sum(kept) == most
        assert all(count <= limit for count, limit in zip(kept, room, strict=True))
        inside = sorted((value for row, limit in zip(rows, room, strict=True) for value in row[:limit]), reverse=True)
        taken = sorted((value for row, count in zip(rows, kept, strict=True) for value in row[:count]), reverse=True)
        assert taken == inside[:most]


def test_equal_values_are_shared_out():
    assert best(torch.zeros(3, 4), torch.tensor([4, 4, 2]), 7).tolist() == [3, 2, 2]
    assert best(torch.tensor([[0.5, 0.9], [0.6, 0.1]]), torch.tensor([2, 2]), 2).tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(40))
def test_chosen_children_get_the_best_rate_of_all(seed):
    generator = random.Random(seed)
    rows, cost, spent = chains(generator, 3, 3), random_curve(generator), generator.uniform(0, 2)
    kept = allocate(torch.tensor(rows), verify=cost, spent=spent, sampled=False).tolist()

    def rate(lengths: list[int]) -> float:
        gain = len(rows) + sum(sum(row[:length]) for row, length in zip(rows, lengths, strict=True))
        return gain / (spent + float(cost.at(torch.tensor(len(rows) + sum(lengths)))))

    every = [[a, b, c] for a in range(4) for b in range(4) for c in range(4)]
    there = [
        lengths
        for lengths in every
        if all(length <= sum(v > 0 for v in row) for length, row in zip(lengths, rows, strict=True))
    ]
    assert rate(kept) == pytest.approx(max(map(rate, there)))


@pytest.mark.parametrize("seed", range(40))
def test_drawn_children_stop_at_the_first_slot_that_does_not_pay(seed):
    generator = random.Random(seed)
    rows, cost, spent = chains(generator, 3, 4), random_curve(generator), generator.uniform(0, 2)
    hull = cost.hull()
    slots = sorted(
        ((-value, place, r) for r, row in enumerate(rows) for place, value in enumerate(row)), key=lambda s: s
    )
    kept, gain = [0, 0, 0], 3.0
    for number, (minus, _, r) in enumerate(slots, start=3):
        before, after = (spent + float(hull.at(torch.tensor(rows))) for rows in (number, number + 1))
        if minus == 0 or -minus < gain / before * (after - before):
            break
        kept[r] += 1
        gain -= minus
    assert allocate(torch.tensor(rows), verify=cost, spent=spent, sampled=True).tolist() == kept


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_beside_other_rows_time_costs_what_it_brings_elsewhere(seed, sampled):
    generator = random.Random(seed)
    trees, cost, rate = chains(generator, 2, 3), random_curve(generator), generator.uniform(0.2, 3)
    beside, price = generator.randrange(20), cost.hull() if sampled else cost
    seconds = [price.cost(beside + 2 + nodes) for nodes in range(7)]
    values = sorted((value for tree in trees for value in tree if value > 0), reverse=True)
    if sampled:
        dear = [v < rate * (after - before) for v, (before, after) in zip(values, pairwise(seconds), strict=False)]
        expected = [*dear, True].index(True)
        scores = None
    else:
        scores = [sum(values[:nodes]) - rate * seconds[nodes] for nodes in range(len(values) + 1)]
    kept = allocate(torch.tensor(trees), verify=cost, spent=0.0, sampled=sampled, rows=beside, rate=rate)
    if scores is None:
        assert int(kept.sum()) == expected
    else:
        assert scores[int(kept.sum())] == pytest.approx(max(scores))


def test_prompts_in_a_step_leave_room_for_good_nodes_only():
    controller = Controller(costs((1, 1.0), (16, 1.0), (116, 11.0)), sampled=False)
    value, depth = torch.tensor([[0.9, 0.3], [0.8, 0.1]]), torch.tensor([[1, 2], [1, 2]])
    assert controller.share_beside(value, depth, 40).tolist() == [2, 2], "nothing is known of its time yet"
    assert controller.share(value, depth, 0.1).tolist() == [2, 2]
    assert controller.share_beside(value, depth, 40).tolist() == [2, 2], "these trees have no say in it"
    assert controller.share(value, depth, 0.1).tolist() == [2, 2]
    assert controller.share_beside(value, depth, 40).tolist() == [1, 1], "a row is worth 0.37 tokens"
    assert controller.share_beside(value, depth, 2).tolist() == [2, 2], "rows are still free"


def test_what_a_drawn_token_leads_to_has_no_say_in_its_own_cut_beside_prompts():
    """Two outcomes of one draw: the same first node, behind which much or nothing is likely."""
    kept = []
    for likely in (0.9, 0.001):
        for dear in range(2, 60):
            controller = Controller(costs((1, 1.0), (16, 1.0), (116, 1.0 + dear / 2)), sampled=True)
            past = torch.tensor([[0.3, 0.2, 0.1]]), torch.tensor([[1, 2, 3]])
            for _ in range(6):
                controller.share(*past, 0.1)
            value, depth = torch.tensor([[0.17, 0.17 * likely, 0.17 * likely]]), torch.tensor([[1, 2, 3]])
            controller.share(value, depth, 0.1)
            kept.append(int(controller.share_beside(value, depth, 60)) > 0)
    assert kept[: len(kept) // 2] == kept[len(kept) // 2 :]
    assert {*kept} == {True, False}, "the first node is kept where rows are cheap, and not where they are dear"


def test_free_rows_are_all_taken_and_dear_ones_are_not():
    values = torch.tensor([[0.5, 0.4, 0.0], [0.9, 0.01, 0.001]])
    free, dear = curve((1, 1.0), (100, 1.0)), curve((1, 1.0), (2, 2.0), (100, 100.0))
    for sampled in (False, True):
        assert allocate(values, verify=free, spent=0.0, sampled=sampled).tolist() == [2, 3]
        assert allocate(values, verify=dear, spent=0.0, sampled=sampled).tolist() == [0, 0]


def test_a_node_counts_for_no_more_than_the_one_before():
    values = torch.tensor([[0.1, 0.9], [0.5, 0.4]])
    cost = curve((1, 1.0), (100, 20.0))
    assert (
        allocate(values, verify=cost, spent=0.0, sampled=False).tolist()
        == allocate(torch.tensor([[0.1, 0.1], [0.5, 0.4]]), verify=cost, spent=0.0, sampled=False).tolist()
    )


def test_more_requests_get_fewer_nodes_each():
    sizes = []
    for requests in (1, 2, 8, 32):
        values = (0.7 ** torch.arange(1, 21)).expand(requests, 20)
        kept = allocate(values, verify=LINEAR, spent=0.0, sampled=False)
        sizes.append(float(kept.double().mean()))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] > 0


# Calibration.


def observed(calibration: Calibration, seed: int, steps: int, chance: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        value = torch.rand(40, generator=generator).double() ** 3
        depth = torch.randint(1, 6, (40,), generator=generator)
        accepted = torch.rand(40, generator=generator) < (value**chance) * 0.9**depth
        calibration.observe(value.tolist(), depth.tolist(), accepted.tolist())


def test_without_observations_a_value_is_its_own_chance():
    value = torch.logspace(-3, -0.02, 50).double()
    for depth in (1, 7, 40):
        found = Calibration()(value, torch.full_like(value, depth).long())
        assert (found / value - 1).abs().max() < 0.25
    assert Calibration()(torch.zeros(1), torch.ones(1).long()).tolist() == [0.0]


@pytest.mark.parametrize("chance", [0.5, 1.0, 2.0])
def test_what_is_predicted_is_what_is_accepted(chance):
    calibration = Calibration()
    observed(calibration, 0, 1000, chance)
    calibration.predicted = calibration.observed = 0.0
    observed(calibration, 1, 500, chance)
    assert 0.95 < calibration.predicted / calibration.observed < 1.05


def test_lucky_bins_promise_nothing():
    """With a running maximum in place of the regression it comes to 1.014."""
    predicted = accepted_nodes = 0.0
    for seed in range(4):
        calibration, values = Calibration(), torch.Generator().manual_seed(seed)
        for _ in range(500):
            value = torch.rand(16, generator=values).double() ** 2
            accepted = torch.rand(16, generator=values) < value
            calibration.observe(value.tolist(), [1 + node // 2 for node in range(16)], accepted.tolist())
        predicted, accepted_nodes = predicted + calibration.predicted, accepted_nodes + calibration.observed
    assert 0.99 < predicted / accepted_nodes < 1.005


def test_it_never_falls_with_the_value():
    calibration = Calibration()
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):  # noise: whatever happens, the order of slots of a depth stays
        value = torch.rand(20, generator=generator)
        calibration.observe(value.tolist(), [1] * 20, (torch.rand(20, generator=generator) < 0.5).tolist())
    value = torch.logspace(-6, 0, 400)
    found = calibration(value, torch.ones(400).long())
    assert (found.diff() >= -1e-12).all()


def test_what_is_predicted_is_the_sum_of_the_chances():
    calibration = Calibration()
    observed(calibration, 0, 20, 0.5)
    value, depth = torch.logspace(-6, 0, 400), torch.arange(1, 21).repeat(20)
    expected = float(calibration(value, depth).sum())
    calibration.predicted = 0.0
    calibration.observe(value.tolist(), depth.tolist(), [False] * 400)
    assert calibration.predicted == pytest.approx(expected)


def test_it_follows_a_change():
    calibration = Calibration()
    observed(calibration, 0, 1000, 2.0)
    observed(calibration, 1, 2000, 0.5)
    value, depth = torch.tensor([0.25]), torch.tensor([1])
    assert float(calibration(value, depth)) == pytest.approx(0.45, abs=0.06)


# Sharpening.


@pytest.mark.parametrize(("true", "first"), [(0.5, 0.6), (0.6, 1.0), (1.2, 0.6)])
def test_the_temperature_that_says_best_what_the_target_takes(true, first):
    sharpening, generator = Sharpening(first), torch.Generator().manual_seed(0)
    for _ in range(600):
        logits = 2 * torch.randn(2, 50, generator=generator)
        token = torch.multinomial((logits / true).softmax(-1), 1, generator=generator)[:, 0]
        sharpening.observe([*logits], token.tolist())
    assert sharpening.temperature == pytest.approx(true, rel=0.1)


def test_a_useless_draft_is_flattened_and_a_perfect_one_sharpened_within_bounds():
    useless, perfect, generator = Sharpening(0.6), Sharpening(0.6), torch.Generator().manual_seed(0)
    for _ in range(2000):
        logits = 5 * torch.randn(1, 50, generator=generator)
        useless.observe([*logits], torch.randint(50, (1,), generator=generator).tolist())
        perfect.observe([*logits], logits.argmax(-1).tolist())
    assert useless.temperature == 2.0
    assert 0.2 <= perfect.temperature < 0.4


def test_few_tokens_wait_for_others():
    one_by_one, together = Sharpening(0.6), Sharpening(0.6)
    logits = [*torch.randn(TOGETHER, 20, generator=torch.Generator().manual_seed(0))]
    token = [int(one.argmax()) for one in logits]
    for at in range(TOGETHER):
        assert one_by_one.temperature == 0.6
        one_by_one.observe(logits[at : at + 1], token[at : at + 1])
    for at in range(0, TOGETHER, EACH):
        assert together.temperature == 0.6
        together.observe(logits[at : at + EACH], token[at : at + EACH])
    assert one_by_one.temperature == together.temperature != 0.6


@pytest.mark.parametrize("requests", [EACH + 1, 2 * EACH, 3 * EACH + 2])
def test_of_a_large_batch_some_count_and_all_in_turn(requests):
    sharpening, counted = Sharpening(0.6), set()
    for _ in range(requests):
        before = len(sharpening.waiting)
        sharpening.observe([*torch.eye(requests)], [0] * requests)
        new = sharpening.waiting[before:] if len(sharpening.waiting) > before else sharpening.waiting
        assert len(new) <= EACH
        counted |= {int(logits.argmax()) for logits, _ in new}
    assert counted == set(range(requests))


def test_banned_tokens_change_nothing():
    with_them, without, generator = Sharpening(0.6), Sharpening(0.6), torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = torch.randn(3, 20, generator=generator)
        with_them.observe([*torch.nn.functional.pad(logits, (0, 5), value=-torch.inf)], logits.argmax(-1).tolist())
        without.observe([*logits], logits.argmax(-1).tolist())
    assert with_them.temperature == pytest.approx(without.temperature)


def test_tokens_of_others_teach_nothing():
    some, alone, generator = Sharpening(0.6), Sharpening(0.6), torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randn(3, 20, generator=generator)
        token, among = logits.argmax(-1), torch.tensor([True, False, True])
        some.learn(*some.measured(logits, token.where(among, -1), among).tolist())
        alone.learn(*alone.measured(logits[among], token[among], torch.tensor([True, True])).tolist())
    assert some.temperature == pytest.approx(alone.temperature)
    assert alone.temperature < 0.6


# The law of a batch that shares its nodes, exactly.


def joint_bias(
    proposer: Proposer,
    rule: str,
    pair: int,
    *,
    nodes: int = 4,
    sampled: bool = True,
    verify: Curve = PLATEAUS,
    prompts: int = 0,
) -> tuple[float, set[tuple[int, int]]]:
    """Total variation between what two requests emit and what their targets say, and the numbers of nodes kept; with
    rows of `prompts` in the step, after a second cut."""
    drafts = [ToyLM.random(3, 2, seed=2 * pair + r, scale=1.5) for r in range(2)]
    targets = [
        ToyLM(draft.logits + ToyLM.random(3, 2, seed=90 + pair - r, scale=1.0).logits) for r, draft in enumerate(drafts)
    ]
    length = proposer.max_depth + 1
    every = every_draft(proposer, drafts, nodes=nodes)
    sides = [every.rows((every.group == r).nonzero()[:, 0]) for r in range(2)]
    laws = []  # of each request: [trees, nodes + 1, sequences]
    for side, target in zip(sides, targets, strict=True):
        each = side._replace(weight=torch.ones_like(side.weight), group=torch.arange(len(side.group)))
        cuts = stacked([cut(each, kept, kept * len(side.group)) for kept in range(nodes + 1)])
        law = emitted(cuts, [target], rule, proposer.kind, length=length).probs
        laws.append(law.unflatten(0, (nodes + 1, -1)).transpose(0, 1))
    joint, sizes = torch.zeros(laws[0].shape[2], laws[1].shape[2]).double(), set()
    values = [side.tree.log_weight.exp().double() for side in sides]
    for i, a in enumerate(values[0]):
        for j, b in enumerate(values[1]):
            both = torch.stack([a, b])
            first = allocate(both, verify=verify, spent=0.4, sampled=sampled)
            left = both.masked_fill(torch.arange(nodes) >= first[:, None], 0.0)
            again = allocate(left, verify=verify, spent=0.0, sampled=sampled, rows=prompts, rate=3.0)
            kept = (again if prompts else first).tolist()
            sizes.add(tuple(kept))
            weight = sides[0].weight[i] * sides[1].weight[j]
            joint += weight * laws[0][i, kept[0]][:, None] * laws[1][j, kept[1]]
    plain = targets[0].continuations(length)[:, None] * targets[1].continuations(length)
    return float((joint - plain).abs().sum() / 2), sizes


DRAWN: dict[str, Callable[[], Proposer]] = {
    "heap": lambda: DySpec(max_depth=2, max_children=3, threshold=0),
    "threshold": lambda: DySpec(max_depth=2, max_children=2, threshold=0.05),
}


@pytest.mark.parametrize("rule", ["rrsw", "traversal", "target_only"])
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_trees_that_share_a_budget_keep_the_law(name, rule):
    sizes = set()
    for pair in range(3):
        bias, kept = joint_bias(DRAWN[name](), rule, pair)
        assert bias < 1e-9
        sizes |= kept
    assert len({sum(kept) for kept in sizes}) > 2, "the budget decides nothing here"
    assert len({a - b for a, b in sizes}) > 2, "the requests do not share it"


@pytest.mark.parametrize("rule", ["rrsw", "traversal", "target_only"])
def test_trees_cut_again_beside_prompts_keep_the_law(rule):
    changed = 0
    for pair in range(3):
        _, once = joint_bias(DRAWN["heap"](), rule, pair)
        bias, twice = joint_bias(DRAWN["heap"](), rule, pair, prompts=1)
        assert bias < 1e-9
        changed += once != twice
        assert len(twice) > 1
    assert changed


def test_the_best_rate_of_drawn_trees_is_biased_on_plateaus():
    assert max(joint_bias(DRAWN["heap"](), "rrsw", pair, sampled=False)[0] for pair in range(6)) > 1e-2


@pytest.mark.parametrize("rule", ["target_only"])
def test_chosen_trees_may_take_the_best_rate(rule):
    sizes = set()
    for pair in range(3):
        bias, kept = joint_bias(OptTree(max_depth=2, threshold=0.0), rule, pair, sampled=False)
        assert bias < 1e-9
        sizes |= kept
    assert sizes != {(0, 0)}


# The controller.


def step(controller: Controller, requests: int, chance: float, spent: float) -> bool | None:
    """One step of chains of five; whether it drafted, and verified any node."""
    if not controller.drafts(requests):
        return None
    controller.depth(requests)
    value = (chance ** torch.arange(1, 6)).expand(requests, 5)
    depth = torch.arange(1, 6).expand(requests, 5)
    return bool(controller.share(value, depth, spent, levels=4).sum() > 0)


def test_drafts_that_pay_go_on():
    controller = Controller(costs((1, 1.0), (100, 2.0)), sampled=False)
    assert all(step(controller, 2, 0.8, spent=0.2) for _ in range(300))


def test_drafts_that_do_not_pay_rest_longer_and_longer():
    controller = Controller(costs((1, 1.0), (100, 100.0)), sampled=False)
    drafted = [n for n in range(3000) if step(controller, 2, 0.3, spent=0.5) is not None]
    rests = [b - a - 1 for a, b in pairwise(drafted)]
    assert [rest for rest in rests if rest] == [64, 128, 256, 512, 1024]
    assert len(drafted) <= FIRST + 7 * TRIAL


def test_the_longest_rest():
    controller = Controller(costs((1, 1.0), (100, 100.0)), sampled=False)
    drafted = [n for n in range(12000) if step(controller, 2, 0.3, spent=0.5) is not None]
    assert max(b - a - 1 for a, b in pairwise(drafted)) == 2048


def test_a_batch_of_another_size_is_judged_by_itself():
    """Two requests may draft while 32 rest, and rest again where they stopped."""
    controller = Controller(costs((1, 1.0), (8, 1.1), (200, 30.0)), sampled=False)
    crowded = [step(controller, 32, 0.5, spent=1.0) for _ in range(FIRST + TRIAL + 2)]
    assert None not in crowded[: FIRST + TRIAL]
    assert crowded[FIRST + TRIAL :] == [None, None]
    assert all(step(controller, 2, 0.8, spent=0.2) for _ in range(10))
    assert step(controller, 32, 0.5, spent=1.0) is None


@pytest.mark.parametrize(("level", "hopeless"), [(0.9, False), (1.1, True), (5.0, True)])
def test_a_draft_that_is_as_dear_as_the_target_is_not_tried(level, hopeless):
    """Rows are free: a chain of k tokens that are all accepted saves k forwards, and costs k levels."""
    verify, draft = curve((1, 1.0), (1000, 1.0)), curve((1, level), (1000, level))
    controller = Controller(Costs(verify, draft), sampled=False)
    controller.levels_seen = TRIAL
    assert controller.drafts(4) != hopeless
    doubted = Controller(Costs(verify, draft), sampled=False)
    assert doubted.drafts(4) == (level < DOUBT), "a profile may be wrong, until drafts were seen"
    assert Controller(Costs(verify, draft), sampled=False, most=5).drafts(4), "a fixed budget is not asked"
    assert Controller(Costs(verify), sampled=False).drafts(4), "nothing is known of it"


def test_sampled_requests_are_judged_apart_from_greedy_ones():
    """A load that does not pay sends no other to rest."""
    controller = Controller(costs((1, 1.0), (8, 1.1), (200, 3.0)), sampled=False)
    controller.begin([False] * 8)
    while step(controller, 8, 0.1, spent=1.0) is not None:
        pass
    controller.begin([True] * 8)
    assert all(step(controller, 8, 0.9, spent=0.1) for _ in range(2 * TRIAL))
    controller.begin([True] * 4 + [False] * 4)
    assert step(controller, 8, 0.9, spent=0.1)
    controller.begin([False] * 8)
    assert step(controller, 8, 0.1, spent=1.0) is None


def test_one_value_is_not_one_chance_to_sampled_and_greedy_requests():
    controller = Controller(costs((1, 1.0), (4, 1.3), (100, 100.0)), sampled=False)
    sampled, greedy = controller.calibrations
    for _ in range(50):
        sampled.observe([0.5] * 8, [1] * 8, [False] * 8)
        greedy.observe([0.5] * 8, [1] * 8, [True] * 8)
    value, depth = torch.full((2, 1), 0.5), torch.ones(2, 1).long()
    for kinds in ([True, False], [False, True], [True, True], [False, False]):
        kept = controller.share(value, depth, 0.1, greedy=torch.tensor(kinds))
        assert kept.tolist() == [int(one) for one in kinds]
    assert controller.share(value, depth, 0.1).tolist() == [0, 0]


def test_it_tries_again_and_finds_that_times_have_changed():
    controller = Controller(costs((1, 1.0), (100, 100.0)), sampled=False)
    while step(controller, 2, 0.9, spent=0.5) is not None:
        pass
    controller.verify = curve((1, 1.0), (100, 1.1))
    resumed = [n for n in range(3000) if step(controller, 2, 0.9, spent=0.0) is not None]
    assert resumed[0] == 63, "steps of rest"
    assert resumed[-200:] == list(range(2800, 3000))


def test_a_step_that_caught_up_is_not_judged():
    controller = Controller(costs((1, 1.0), (100, 100.0)), sampled=False)
    while controller.depth(1) > 1:
        controller.share(torch.tensor([[0.1]]), torch.ones(1, 1).long(), 50.0)
    for judged in (False, True):
        assert controller.drafts(1)
        for _ in range(TRIAL):
            controller.share(torch.tensor([[0.1]]), torch.ones(1, 1).long(), 50.0, judged=judged)
    assert not controller.drafts(1)


def test_what_is_read_besides_counts_step_by_step():
    """One step in ten reads a prompt; a trial of a few steps does not fall for it, many do."""
    value, depth = torch.tensor([[0.8]]), torch.ones(1, 1).long()
    for prompt, rests in ((1.0, False), (20.0, True)):
        controller = Controller(costs((1, 1.0), (100, 2.0)), sampled=False)
        drafts = []
        for n in range(200):
            drafts.append(controller.drafts(1))
            controller.depth(1)
            if drafts[-1]:
                controller.share(value, depth, prompt if n % 10 == 0 else 0.1, judged=n % 10 > 0)
        assert all(drafts[:20])
        assert all(drafts) != rests


def test_a_few_poor_steps_do_not_stop_drafting():
    controller = Controller(costs((1, 1.0), (100, 2.0)), sampled=False)
    assert all(step(controller, 1, 0.8, spent=0.2) for _ in range(60))
    assert [step(controller, 1, 0.0, spent=0.2) for _ in range(4)] == [False] * 4
    assert all(step(controller, 1, 0.8, spent=0.2) for _ in range(200))


# Trials that recent trees foresee.

ROWS_COST = ((1, 1.0), (8, 1.1), (32, 2.0), (64, 3.2), (1000, 70.0))


def foreseen(chance: float, level: float, trees: int = 40, pause: int = 0) -> bool:
    """Whether 32 requests draft for the first time after `trees` steps of one request, `pause` steps later."""
    controller = Controller(Costs(curve(*ROWS_COST), curve((1, level), (64, level))), sampled=False)
    assert all(step(controller, 1, chance, spent=level) is not None for _ in range(trees))
    controller.steps += pause
    return controller.drafts(32)


def test_recent_trees_say_what_a_larger_batch_would_lose():
    """There a row brings 16 tokens a second, and 32 rows more cost 1.2 seconds: only nearly certain nodes pay."""
    assert not foreseen(0.6, level=0.1)
    assert foreseen(0.6, level=0.1, trees=ENOUGH - 1), "too few trees to say so"
    assert foreseen(0.6, level=0.1, pause=RECENT), "trees of long ago"
    assert foreseen(0.97, level=0.01), "trees that pay there too"
    assert not foreseen(0.97, level=0.7), "but not for dear levels"


def test_a_foreseen_loss_rests_as_a_trial_that_lost():
    controller = Controller(Costs(curve(*ROWS_COST), curve((1, 0.1), (64, 0.1))), sampled=False)
    tried = []
    for n in range(400):
        step(controller, 1, 0.6, spent=0.1)
        if n >= ENOUGH and controller.drafts(32):
            tried.append(n)
    assert not tried
    assert controller.of(32).last_rest == 256, "64, 128, 256"
    controller.foresight[0].seen.clear()
    waited = next(n for n in range(1000) if controller.drafts(32))
    assert waited < 256
    assert step(controller, 32, 0.6, spent=0.1) is not None


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("requests", [1, 3, 16, 40])
def test_the_foreseen_rate_is_that_of_the_best_depth(requests, sampled):
    """Equal trees: a chain of four and one sibling of its first node, brute force over depths and numbers of nodes."""
    foresight, verify = Foresight(sampled=sampled), curve(*ROWS_COST)
    chance, depth = torch.tensor([0.7, 0.5, 0.3, 0.25, 0.2]), torch.tensor([1, 2, 1, 3, 4])
    for n in range(20):
        foresight.see(n, chance[None], depth[None])
    assert foresight.best_rate(requests, 20 + RECENT, verify=verify, overhead=0.2, level=0.05) is None
    found = foresight.best_rate(requests, 20, verify=verify, overhead=0.2, level=0.05)
    rates = []
    for levels in range(1, 5):
        nodes = sorted((chance[depth <= levels].tolist() * requests), reverse=True)
        spent = 0.2 + 0.05 * levels
        rates += [(requests + sum(nodes[:k])) / (verify.cost(requests + k) + spent) for k in range(len(nodes) + 1)]
    assert found is not None
    if sampled:  # a stopping rule, which may stop short of the best
        assert 0.9 * max(rates) <= found <= max(rates) + 1e-6
    else:
        assert found == pytest.approx(max(rates))


# The levels.


def deep(controller: Controller, chance: float, level: float, steps: int) -> list[int]:
    """The levels of each step of one request whose draft has depth 8 at most: a chain, `level` seconds each."""
    taken = []
    for _ in range(steps):
        levels = min(8, controller.depth(1))
        value, depth = (chance ** torch.arange(1, levels + 1))[None], torch.arange(1, levels + 1)[None]
        for _ in range(levels - 1):
            controller.drafted(1, level)
        controller.share(value, depth, level * levels, levels=levels - 1)
        taken.append(levels)
    return taken


@pytest.mark.parametrize(("chance", "level", "best"), [(0.5, 0.05, 3), (0.8, 0.05, 8), (0.5, 1e-6, 8), (0.5, 0.4, 1)])
def test_levels_are_drafted_while_they_pay(chance, level, best):
    """A verification of a second: one more level brings chance^d tokens, and costs what the others bring meanwhile."""
    controller = Controller(costs((1, 1.0), (100, 1.001)), sampled=False)
    taken = deep(controller, chance, level, 96)
    assert [n for n in range(96) if taken[n] == 8][:FIRST] == list(range(FIRST))
    usual = [levels for n, levels in enumerate(taken) if n > 48 and n % EVERY]
    assert set(usual) == {best}
    rates = [sum(chance**k for k in range(d + 1)) / (1 + level * d) for d in range(1, 9)]
    assert rates[best - 1] >= 0.99 * max(rates), "the depth of the best rate"


@pytest.mark.parametrize("most", [None, 40])
def test_trees_may_be_deeper_than_depths_are_told_apart(most):
    controller = Controller(costs((1, 1.0), (100, 1.001)), sampled=False, most=most)
    value, depth = torch.full((1, 40), 0.9), torch.arange(1, 41)[None]
    for _ in range(FIRST + 3):
        assert controller.depth(1) >= 40
        controller.share(value, depth, 0.01, levels=39)


def test_a_level_that_begins_to_pay_is_found():
    controller = Controller(costs((1, 1.0), (100, 1.001)), sampled=False)
    assert deep(controller, 0.3, 0.2, 60)[-1] < 3
    assert deep(controller, 0.95, 0.02, 400)[-2] == 8


@pytest.mark.parametrize(("sibling", "best"), [(0.45, 1), (0.1, 2)])
def test_a_level_pays_by_what_its_nodes_bring_beyond_those_in_whose_rows_they_stand(sibling, best):
    """Four requests, rows for eight nodes: each may have a second level, or a sibling that is drafted in any case."""
    controller = Controller(costs((1, 1.0), (12, 1.001), (13, 3.0), (40, 9.0)), sampled=False)
    taken = []
    for _ in range(3 * EVERY):
        levels = min(2, controller.depth(4))
        value, depth = torch.tensor([0.5, 0.47, sibling]), torch.tensor([1, 2, 1])
        value = value.masked_fill(depth > levels, 0.0).sort(descending=True, stable=True)
        for _ in range(levels - 1):
            controller.drafted(4, 0.05)
        controller.share(value.values.expand(4, 3), depth[value.indices].expand(4, 3), 0.05 * levels, levels=levels - 1)
        taken.append(levels)
    usual = [levels for n, levels in enumerate(taken) if n > EVERY and n % EVERY]
    assert set(usual) == {best}


def test_a_level_that_seldom_paid_is_found_by_a_few_trials():
    """Each stands for the steps between them; as one of many, the same takes hundreds of steps."""
    controller = Controller(costs((1, 1.0), (100, 1.001)), sampled=False)
    assert deep(controller, 0.3, 0.2, 1000)[-1] < 3
    assert deep(controller, 0.95, 0.02, 5 * EVERY)[-1] == 8


def test_the_threshold_is_a_levels_cost_at_the_best_rate():
    controller = Controller(costs((1, 1.0), (100, 1.0)), sampled=False)
    assert controller.threshold(1, 1) == 0, "every level pays until it is known what one costs"
    deep(controller, 0.5, 0.1, 30)
    size = controller.of(1)
    assert controller.threshold(1, 1) == pytest.approx(0.1 * size.rate, rel=0.05)
    assert size.rate == pytest.approx(
        max(sum(0.5**k for k in range(d + 1)) / (1 + 0.1 * d) for d in range(1, 8)), rel=0.1
    )


def test_nodes_that_a_batch_would_not_verify_get_no_children():
    """The floor lies below the least value that recent steps kept, and is that of batches of this size."""
    controller = Controller(costs((1, 1.0), (100, 4.0)), sampled=False)
    assert controller.floor(4) == -math.inf, "not known yet"
    value, depth = torch.tensor([0.8, 0.4, 0.01]).expand(4, 3), torch.arange(1, 4).expand(4, 3)
    assert controller.share(value, depth, 0.1).tolist() == [2] * 4
    assert math.exp(controller.floor(4)) == pytest.approx(0.2)
    assert controller.floor(1) == -math.inf
    for _ in range(50):
        controller.share(value / 2, depth, 0.1)
    assert 0.05 < math.exp(controller.floor(4)) < 0.15
    controller.share(value * 1e-9, depth, 0.1)
    assert math.exp(controller.floor(4)) > 0.05, "nothing was kept, so nothing was learned"
    assert Controller(Costs(FREE), sampled=False, most=4).floor(4) == -math.inf


def test_the_first_forward_of_so_many_rows_says_nothing():
    controller = Controller(costs((1, 1.0), (100, 1.0)), sampled=False)
    controller.observe(4, 0, 9.0, 0.1)
    assert controller.verify.cost(4) == 1.0
    controller.observe(4, 0, 9.0, 0.1)
    assert controller.verify.cost(4) > 1.0


def test_one_long_pause_between_steps_is_not_believed():
    controller = Controller(costs((1, 1.0), (100, 2.0)), sampled=False)
    for _ in range(50):
        controller.observe(4, 0, 1.0, 0.1)
    assert controller.overhead == pytest.approx(0.1, rel=1e-3)
    controller.observe(4, 0, 1.0, 1000.0)
    assert controller.overhead < 0.2


@pytest.mark.parametrize("sampled", [False, True])
def test_a_fixed_budget_takes_the_best_of_all(sampled):
    controller = Controller(Costs(FREE), sampled=sampled, most=4)
    value = torch.tensor([[0.9, 0.8, 0.7, 0.6], [0.75, 0.5, 0.0, 0.0], [0.1, 0.1, 0.1, 0.0]])
    depth = torch.arange(1, 5).expand(3, 4)
    kept = controller.share(value, torch.ones_like(depth), 1.0)
    assert kept.tolist() == [3, 1, 0]
    assert controller.drafts(3)


def test_the_cut_of_drawn_trees_does_not_look_at_how_long_their_drafting_took():
    """A long draft tells of the tokens that it drew; chosen trees may be cut by it."""
    value, depth = (0.7 ** torch.arange(1, 6)).expand(2, 5), torch.arange(1, 6).expand(2, 5)

    def kept(sampled: bool, spent: float) -> list[int]:
        controller = Controller(costs((1, 1.0), (100, 30.0)), sampled=sampled)
        for _ in range(3):
            controller.share(value, depth, 1.0)
        return controller.share(value, depth, spent).tolist()

    assert kept(True, 0.0) == kept(True, 9.0)
    assert kept(False, 0.0) != kept(False, 9.0)
    after = Controller(costs((1, 1.0), (100, 30.0)), sampled=True)
    first = after.share(value, depth, 9.0).sum()
    assert after.share(value, depth, 0.0).sum() > first, "but past steps count"


def test_what_the_contexts_cost_is_no_matter_of_rows():
    controller = Controller(costs((1, 1.0), (100, 2.0), context=0.001), sampled=False)
    for _ in range(20):
        controller.observe(1, 500, 1.5, 0.25)
    assert controller.verify.cost(1) == pytest.approx(1.0)
    assert controller.overhead == pytest.approx(0.75, rel=0.01)


def test_a_level_costs_what_was_measured_until_it_is_seen():
    controller = Controller(costs((1, 1.0), (100, 2.0), draft=curve((1, 0.2), (9, 1.0))), sampled=False)
    assert [controller.level(requests) for requests in (1, 5)] == pytest.approx([0.2, 0.6])
    controller.drafted(1, 0.4)
    assert controller.level(1) == pytest.approx(0.24)
    assert controller.level(5) > 0.6, "of a size that was not seen the curve tells, which follows"


def test_costs_as_json():
    for written in (
        costs((1, 1.0), (4, 2.0)),
        costs((1, 1.0), (4, 2.0), draft=curve((1, 0.1), (8, 0.2)), context=1e-6),
    ):
        assert str(Costs.from_json(json.loads(json.dumps(written.to_json())))) == str(written)
    good = costs((1, 1.0), (4, 2.0)).to_json()
    for wrong in ({}, [], None, {**good, "context": -1}, {**good, "context": math.nan}, {**good, "draft": 3}):
        with pytest.raises(ValueError, match="number|missing|curve"):
            Costs.from_json(wrong)


def test_requests_that_draft_nothing_cost_their_row_and_bring_their_token():
    verify, value = curve((1, 1.0), (2, 1.0), (100, 99.0)), torch.tensor([[0.5, 0.5]])
    alone, among = (Controller(Costs(verify), sampled=False) for _ in range(2))
    depth = torch.ones(1, 2).long()
    assert alone.share(value, depth, 0.0).tolist() == [1], "the second row is free"
    assert among.share(value, depth, 0.0, others=3).tolist() == [0], "the fifth is not"


def test_a_request_whose_trees_lose_pauses_alone():
    pauses, batch = Pauses(), ["a", "b"]
    for _ in range(LOSSES):
        assert pauses.drafting(batch) == [True, True]
        pauses.observe(batch, [0, 3])
    for _ in range(PAUSE):
        assert pauses.drafting(batch) == [False, True]
        pauses.observe(["b"], [1])
    assert pauses.drafting(batch) == [True, True]
    pauses.observe(batch, [0, 1])
    assert pauses.drafting(batch) == [False, True], "one loss more"
    pauses.forget(["a"])
    assert pauses.drafting(batch) == [True, True]


def test_a_smaller_batch_tries_all_again():
    pauses, batch = Pauses(), ["a", "b", "c", "d"]
    for _ in range(LOSSES):
        pauses.drafting(batch)
        pauses.observe(batch, [0, 1, 1, 1])
    assert pauses.drafting(batch) == [False, True, True, True]
    assert pauses.drafting(["a", "b"]) == [True, True]


def test_a_tree_that_wins_once_begins_anew():
    pauses = Pauses()
    for kept in (*[0] * (LOSSES - 1), 1, *[0] * (LOSSES - 1)):
        pauses.observe(["a"], [kept])
    assert pauses.drafting(["a"]) == [True]
