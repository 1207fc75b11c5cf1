"""The planner: one price decides what a batch drafts, expands and verifies."""

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.pure.budget import curve
from vllm_adaptive_tree.budget import Budget, Calibration, Costs, Curve, Plan, Planner
from vllm_adaptive_tree.budget.backoff import MAX_BACKOFF, PROBE_EVERY, RETRY_AFTER, Backoff
from vllm_adaptive_tree.budget.planner import EVERY, MIN_STEPS, MIN_TREES, PRIOR_ACCEPTANCE

FLAT = ((1, 1.0), (1000, 1.0))
STEEP = ((1, 1.0), (100, 100.0))


def planner(*points: tuple[float, float], level: float = 0.05, sampled: bool = False, context: float = 0.0) -> Planner:
    return Planner(Costs(curve(*points), curve((1, level), (1000, level)), context), sampled=sampled)


def step(
    budget: Planner, chance: float, *, greedy: int = 1, sampled: int = 0, deepest: int = 8, learns: bool = True
) -> tuple[Plan, int]:
    """A step of chains whose nodes have `chance`, and what the budget says they do: its plan, the nodes kept."""
    kinds = [True] * greedy + [False] * sampled
    plan = budget.begin(kinds)
    if not plan.levels:
        return plan, 0
    levels = min(deepest, plan.levels)
    depth = torch.arange(1, levels + 1).expand(len(kinds), levels)
    value = chance ** depth.double()
    if learns:
        budget.observe_trees(value, depth, torch.tensor(kinds), plan)
    return plan, int(budget.share(value, depth, torch.tensor(kinds)).sum())


def drafted(budget: Planner, chance: float, steps: int, **load: int) -> list[int]:
    """The steps that drafted."""
    return [n for n in range(steps) if step(budget, chance, **load)[0].levels]


# Whether to draft.


def timed(budget: Planner) -> Planner:
    """One that has heard of a step's time, as every engine by itself has."""
    budget.observe_step(1, 0, budget.costs.verify.cost(1), 0.0, drafted=False)
    return budget


@pytest.mark.parametrize(("level", "first"), [(0.05, MIN_STEPS + RETRY_AFTER), (0.58, MIN_STEPS + 2)])
def test_drafts_that_pay_go_on_but_for_looks_at_a_step_without(level, first):
    """The first look comes at once where the gain is small by the costs of the start: 3.4 times, and 1.1 times."""
    steps = drafted(timed(planner((1, 1.0), (100, 2.0), level=level)), 0.8, 3000, greedy=2)
    looks = [b - a - 1 for a, b in pairwise(steps) if b > a + 1]
    assert looks == [2] * len(looks)
    starts = [a + 1 for a, b in pairwise(steps) if b > a + 1]
    assert starts[0] == first
    assert [b - a - 2 for a, b in pairwise(starts)] == [PROBE_EVERY, 2 * PROBE_EVERY]


def test_no_level_beyond_the_plan_before_its_trees_are_known():
    """Rows are nearly free, a level costs what the third node of a chain is hoped to bring."""
    budget = planner((1, 1.0), (100, 1.01), level=0.2)
    begun = [step(budget, 0.8)[0] for _ in range(MIN_STEPS + EVERY)]
    assert {plan.levels for plan in begun[:MIN_STEPS]} == {begun[0].levels}
    assert max(plan.levels for plan in begun) > begun[0].levels, "the next level is tried afterwards"


def test_drafts_that_do_not_pay_rest_longer_and_longer():
    steps = drafted(planner(*STEEP, level=0.5), 0.3, 3000, greedy=2)
    rests = [b - a - 1 for a, b in pairwise(steps) if b > a + 1]
    assert [steps[0], *rests] == [64, 128, 256, 512, 1024]
    assert len(steps) < 5 * MIN_TREES


@pytest.mark.parametrize(("gain", "pays"), [(0.03, False), (0.07, True)])
def test_drafts_must_gain_more_than_costs_are_accurate(gain: float, pays: bool):
    """Of trees of one node, whose rows cost nothing."""
    chance = float(Calibration()(torch.tensor([0.8]), torch.tensor([1])))
    budget = planner((1, 1.0), (1000, 1.0), level=(1 + chance) / math.exp(gain) - 1)
    steps = drafted(budget, 0.8, 60, deepest=1)
    assert steps == list(range(60)) if pays else len(steps) < MIN_TREES


def test_a_trial_drafts_one_level_more_than_has_paid():
    """And none of those that were hoped for when nothing was known."""
    budget = planner((1, 1.0), (100, 2.0), level=0.3)
    plans = [step(budget, 0.2)[0] for _ in range(300)]
    first = next(n for n, plan in enumerate(plans) if not plan.levels)
    trials = [plan.levels for plan in plans[first:] if plan.levels]
    assert plans[0].levels > 2
    assert len(trials) > 2 * MIN_STEPS
    assert max(trials) == 2


def test_the_longest_rest():
    steps = drafted(planner(*STEEP, level=0.5), 0.3, 12000, greedy=2)
    assert max(b - a - 1 for a, b in pairwise(steps)) == MAX_BACKOFF


@pytest.mark.parametrize(("level", "tried"), [(0.5, True), (0.9, False), (5.0, False)])
def test_a_draft_that_is_too_dear_for_any_hope_is_tried_once_a_rest(level, tried):
    """Rows are free: a level saves at most PRIOR_ACCEPTANCE of a forward, and costs `level` forwards."""
    budget = planner(*FLAT, level=level)
    assert (budget.begin([True] * 4).levels > 0) == tried
    steps = drafted(budget, 0.1, RETRY_AFTER + 3)
    assert (len(steps) <= 2) or tried
    assert tried == (level < PRIOR_ACCEPTANCE)


def test_a_larger_batch_learns_from_the_trees_of_a_smaller():
    """A row more costs 16 requests as much as a token brings one: what one request has seen says so."""
    budget = timed(planner((1, 1.0), (8, 1.1), (32, 2.0), (64, 3.2), (1000, 70.0), level=0.1))
    assert len(drafted(budget, 0.6, 40)) == 40
    assert step(budget, 0.6, greedy=32)[0].levels == 0
    assert step(budget, 0.6)[0].levels > 0, "and one request drafts on"


def test_sampled_requests_are_judged_apart_from_greedy_ones():
    budget = planner((1, 1.0), (8, 1.1), (200, 3.0), level=0.2)
    for _ in range(2 * MIN_TREES):
        step(budget, 0.05, greedy=0, sampled=8)
    assert step(budget, 0.05, greedy=0, sampled=8)[0].levels == 0
    assert step(budget, 0.9, greedy=8)[0].levels > 0
    for _ in range(2 * MIN_TREES):
        step(budget, 0.9, greedy=8)
    assert step(budget, 0.9, greedy=8)[0].levels > 0
    prices = [budget.begin([True] * n + [False] * (8 - n)).price for n in (8, 4, 1)]
    assert prices == sorted(prices, reverse=True)


def test_a_kind_is_remembered_while_the_other_is_served():
    budget = planner((1, 1.0), (8, 1.1), (200, 3.0), level=0.2)
    for _ in range(4):
        for _ in range(20):
            step(budget, 0.9, greedy=8)
        drafting = [step(budget, 0.05, greedy=0, sampled=8)[0].levels > 0 for _ in range(20)]
    assert not any(drafting), "it was tried before"


def test_it_tries_again_and_finds_that_times_have_changed():
    budget = planner(*STEEP, level=0.5)
    assert len(drafted(budget, 0.9, 200, greedy=2)) < 40
    budget.costs = planner((1, 1.0), (100, 1.1), level=0.01).costs
    resumed = drafted(budget, 0.9, 1000, greedy=2)
    assert len([n for n in resumed if n >= 800]) >= 190


def test_what_reading_prompts_takes_counts_against_drafts():
    for prompt, drafts in ((0.1, True), (30.0, False)):
        budget = planner(*FLAT, level=0.05)
        for n in range(100):
            plan, _ = step(budget, 0.7)
            budget.observe_step(1, 0, 1.0, 0.0, drafted=plan.levels > 0, reading=prompt if n % 10 == 0 else 0.0)
        assert (budget.begin([True]).levels > 0) == drafts


def test_what_only_drafting_steps_spend_counts_against_drafts():
    for rest, drafts in ((0.1, True), (3.0, False)):
        budget = planner(*FLAT, level=0.05)
        for _ in range(100):
            plan, _ = step(budget, 0.7)
            budget.observe_step(1, 0, 1.0, rest if plan.levels else 0.1, drafted=plan.levels > 0)
        assert (budget.begin([True]).levels > 0) == drafts


def test_one_long_pause_between_steps_is_not_believed():
    budget = planner((1, 1.0), (100, 2.0))
    for rest in (0.1, 0.1, 1000.0, 0.1):
        budget.observe_step(4, 0, 1.0, rest, drafted=True)
    assert budget.overhead(drafted=True) == pytest.approx(0.1)
    assert budget.overhead(drafted=False) == pytest.approx(0.1), "nothing else is known of it"


# How many levels.


@pytest.mark.parametrize(("chance", "level", "best"), [(0.5, 0.05, 3), (0.8, 0.05, 8), (0.5, 1e-6, 8), (0.5, 0.2, 2)])
def test_levels_are_drafted_while_they_pay(chance, level, best):
    """A verification of a second: one more level brings chance^d tokens, and costs what the others bring meanwhile."""
    budget = planner((1, 1.0), (100, 1.001), level=level)
    plans = [step(budget, chance)[0] for _ in range(12 * EVERY)]
    usual = {min(8, plan.levels) for plan in plans[4 * EVERY :] if plan.levels and not plan.deep}
    rates = [sum(chance**k for k in range(d + 1)) / (1 + level * d) for d in range(1, 9)]
    assert {best} <= usual <= {best - 1, best, best + 1}
    assert min(rates[levels - 1] for levels in usual) > 0.98 * max(rates)
    assert {plan.levels for plan in plans[4 * EVERY :] if plan.deep} == {levels + 1 for levels in usual} or best == 8


@pytest.mark.parametrize(("sibling", "best"), [(0.45, 1), (0.1, 2)])
def test_a_level_pays_by_what_its_nodes_bring_beyond_those_whose_rows_they_take(sibling, best):
    """Four requests, rows for eight nodes: each may have a second level, or a sibling that is drafted in any case."""
    budget = planner((1, 1.0), (12, 1.001), (13, 3.0), (40, 9.0))
    levels = []
    for _ in range(5 * EVERY):
        plan = budget.begin([True] * 4)
        value, depth = torch.tensor([0.5, 0.47, sibling]), torch.tensor([1, 2, 1])
        value = value.masked_fill(depth > plan.levels, 0.0).sort(descending=True, stable=True)
        if plan.levels:
            trees = value.values.expand(4, 3), depth[value.indices].expand(4, 3)
            budget.observe_trees(*trees, torch.ones(4, dtype=torch.bool), plan)
            levels += [] if plan.deep else [plan.levels]
    assert set(levels[EVERY:]) == {best}


def test_trees_may_be_deeper_than_depths_are_told_apart():
    budget = planner((1, 1.0), (100, 1.001), level=1e-4)
    for _ in range(3 * EVERY):
        plan, kept = step(budget, 0.95, deepest=40)
    assert plan.levels >= 16
    assert kept >= 16


# Which nodes.


def test_the_price_is_the_rate_of_the_best_plan():
    budget = planner(*FLAT, level=0.1)
    plans = [step(budget, 0.5)[0] for _ in range(40)]
    best = max(sum(0.5**k for k in range(d + 1)) / (1 + 0.1 * d) for d in range(1, 8))
    assert plans[-1].price == pytest.approx(best, rel=0.1)


def test_a_second_is_worth_what_it_brings():
    """Without drafts, and before trees are known what the drafts are hoped to bring: it cuts the first trees."""
    assert Planner(planner(*FLAT).costs, sampled=False, drafts=False).begin([True] * 3).price == pytest.approx(3.0)
    hoped = max(sum(PRIOR_ACCEPTANCE**k for k in range(d + 1)) / (1 + 0.05 * d) for d in range(1, 17))
    assert planner(*FLAT).begin([True] * 3).price == pytest.approx(3 * hoped)


def test_nodes_that_a_batch_would_not_verify_get_no_children():
    budget = planner((1, 1.0), (200, 40.0), level=0.001)
    plans = [step(budget, 0.6, greedy=4)[0] for _ in range(60)]
    assert math.exp(plans[0].floor) == pytest.approx(plans[0].price * 39 / 199), "by the costs of the start"
    worth = plans[-1].price * 39 / 199
    assert math.exp(plans[-1].floor) >= 0.5 * worth
    deep = [plan.floor for plan in plans[10:] if plan.deep]
    assert deep
    assert min(deep) > -math.inf, "a level more, of what pays"


def test_prompts_in_a_step_leave_room_for_good_nodes_only():
    """Rows are free up to 16, and dear after."""
    budget = planner((1, 1.0), (16, 1.0), (116, 31.0), level=0.01)
    for _ in range(3 * EVERY):
        step(budget, 0.6, greedy=2)
    value, depth = torch.tensor([[0.9, 0.1], [0.8, 0.1]]), torch.tensor([[1, 2], [1, 2]])
    greedy = torch.tensor([True, True])
    assert budget.share(value, depth, greedy).tolist() == [2, 2]
    assert budget.share(value, depth, greedy, rows=2).tolist() == [2, 2], "rows are still free"
    assert budget.share(value, depth, greedy, rows=40).sum() < 4


def test_one_value_is_not_one_chance_to_sampled_and_greedy_requests():
    budget = Budget(sampled=False, most=1)
    sampled, greedy = budget.calibrations
    for _ in range(50):
        sampled.observe([0.5] * 8, [1] * 8, [False] * 8)
        greedy.observe([0.5] * 8, [1] * 8, [True] * 8)
    value, depth = torch.full((2, 1), 0.5), torch.ones(2, 1).long()
    for kinds in ([True, False], [False, True]):
        assert budget.share(value, depth, torch.tensor(kinds)).tolist() == [int(one) for one in kinds]


def test_what_was_verified_goes_to_the_calibration_of_its_kind():
    budget = Budget(sampled=True)
    value, depth = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([1, 1, 2])
    budget.verified(value, depth, torch.tensor([True, True, False]), torch.tensor([True, False, False]))
    assert [one.observed for one in budget.calibrations] == [1, 1]
    expected, observed = budget.take()
    assert observed == 2
    assert expected == pytest.approx(1.2, rel=0.1)
    assert budget.take() == (0.0, 0.0)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_fixed_budget_takes_the_best_of_all(sampled):
    budget = Budget(sampled=sampled, most=4)
    value = torch.tensor([[0.9, 0.8, 0.7, 0.6], [0.75, 0.5, 0.0, 0.0], [0.1, 0.1, 0.1, 0.0]])
    plan = budget.begin([True] * 3)
    assert plan.levels > 1000
    kept = budget.share(value, torch.ones(3, 4).long(), torch.ones(3, dtype=torch.bool))
    assert kept.tolist() == [3, 1, 0]
    assert budget.level(3) * plan.price == 0, "a level costs nothing"


@pytest.mark.parametrize("sampled", [False, True])
def test_a_sampled_token_has_no_say_in_its_own_cut(sampled):
    """Two outcomes of one draw: the same first node, after which much or nothing is likely; rows get dearer."""
    kept = []
    for likely in (0.9, 0.001):
        for dear in range(1, 60):
            budget = planner((1, 1.0), (16, 1.0), (116, 1.0 + dear / 2), sampled=sampled)
            for _ in range(2 * MIN_TREES):
                step(budget, 0.3)
            plan = budget.begin([False])
            value, depth = torch.tensor([[0.17, 0.17 * likely, 0.17 * likely]]), torch.tensor([[1, 2, 3]])
            if plan.levels:
                budget.observe_trees(value, depth, torch.tensor([False]), plan)
            share = budget.share(value, depth, torch.tensor([False]), rows=60, full=60)
            kept.append(share.sum() > 0)
    assert kept[: len(kept) // 2] == kept[len(kept) // 2 :] or not sampled
    assert {*kept} == {True, False}, "the first node is kept where rows are cheap, and not where they are dear"


def test_sampled_nodes_need_the_chance_that_the_plan_found_best():
    budget = planner((1, 1.0), (100, 1.0 + 99 * 0.2), level=0.01, sampled=True)
    for _ in range(4 * EVERY):
        step(budget, 0.8, greedy=0, sampled=1)
    plan = budget.begin([False])
    depth = np.arange(1, 9)[None]
    value = 0.8**depth
    chances = budget.calibrations[0].chances(value, depth)[0]
    kept = int(budget.share(value, depth, [False]).sum())
    assert 0 < kept < 8
    assert kept == int((chances >= plan.least).sum())


def test_fewer_rows_are_tried_where_nobody_has_seen_them():
    budget = planner(*((rows, 1.0) for rows in range(1, 200, 8)), level=1e-3)
    kept = []
    for _ in range(4 * EVERY):
        plan, nodes = step(budget, 0.8, greedy=8)
        budget.observe_step(8 + nodes, 0, 1.0, 0.0, drafted=plan.levels > 0)
        kept.append((budget.steps % EVERY, nodes))
    first = next(nodes for at, nodes in kept if at == EVERY // 2 and nodes)
    assert first < max(nodes for _, nodes in kept)
    assert kept[-EVERY // 2][1] == max(nodes for _, nodes in kept), "once they are known, no more"


# What it follows and keeps.


def test_the_first_forward_of_so_many_rows_may_have_built_kernels():
    budget = planner((1, 1.0), (100, 1.0))
    budget.observe_step(4, 0, 1.9, 0.1, drafted=True)
    assert budget.costs.verify.cost(4) == 1.0
    budget.observe_step(4, 0, 1.9, 0.1, drafted=True)
    assert budget.costs.verify.cost(4) > 1.0


def test_rows_that_never_come_twice_are_learnt_too():
    """A curve that came out flat at its end: free rows by the thousand, each time another number of them."""
    budget = planner((1, 0.1), (100, 0.2), (200, 0.2))
    for rows in range(2000, 2012):
        budget.observe_step(rows, 0, rows / 200, 0.0, drafted=True)
    assert budget.costs.verify.cost(2012) > 2, "it was 0.2, and 1.1 by the mean slope"


@pytest.mark.parametrize("rows", [1, 10])
def test_what_a_context_costs_each_row_is_no_part_of_the_curve(rows):
    budget = planner((1, 1.0), (10, 2.0), context=0.0001)
    forward = budget.costs.verify.cost(rows)
    for _ in range(20):
        budget.observe_step(rows, 500, forward + rows * 0.05, 0.25, drafted=False)
    assert budget.costs.verify.cost(rows) == pytest.approx(forward)
    assert budget.plain_step_seconds(1) == pytest.approx(1.0 + 0.05 + 0.25)


def test_a_prompt_does_not_make_the_rows_of_other_requests_cheap():
    budget = planner((1, 1.0), (500, 2.0), context=0.0001)
    for rows, context in [(4, 1000), (4, 1001), (4, 1002), (504, 8), (4, 1003)]:
        budget.observe_step(rows, context, 5.0, 0.0, drafted=True)
        assert budget.context == pytest.approx(0.1, rel=0.01)


def test_rows_after_long_contexts_must_bring_more():
    """Attention reads a context for every row: what is free after a short one is dear after a long one."""
    values, depth = np.full((1, 8), 0.5), np.arange(1, 9)[None]
    kept, pays, floors = [], [], []
    for context in (0, 1000):
        budget = planner((1, 1.0), (100, 1.01), context=0.001)
        budget.observe_step(1, context, 1.0 + 0.001 * context, 0.0, drafted=False)
        budget.plan = Plan(1, 1.0)
        kept.append(int(budget.share(values, depth, [True]).sum()))
        pays.append(budget.look_up_pays([True], 8))
        floors.append(budget.worth_of_node(1, 1, 1.0))
    assert kept == [8, 0]
    assert pays == [True, False]
    assert floors[0] < 0.1 < floors[1]


def test_a_plan_counts_what_a_context_costs_its_rows():
    rates = []
    for context in (0, 1000):
        budget = planner((1, 1.0), (100, 1.01), context=0.001)
        budget.observe_step(1, context, 1.0 + 0.001 * context, 0.0, drafted=False)
        plain = 1 / budget.plain_step_seconds(1)
        rates.append(budget._rate(budget.recent, 1, 1.0, range(1, 9)).price / plain)
    assert rates[0] > 2.5 > rates[1] > 1


def test_a_level_costs_what_was_measured_until_it_is_seen():
    budget = Planner(Costs(curve(*FLAT), curve((1, 0.2), (9, 1.0))), sampled=False)
    assert [budget.level(requests) for requests in (1, 5)] == pytest.approx([0.2, 0.6])
    budget.observe_level(1, 1, 0.39)
    assert budget.level(1) == pytest.approx(0.2), "the first of a size compiles its kernels"
    budget.observe_level(1, 1, 0.4)
    assert budget.level(1) == pytest.approx(0.4)
    assert budget.level(5) > 0.6


def test_a_level_is_priced_by_the_rows_that_plans_read():
    """Not by those of a level that expands everything, before there is a plan."""
    budget = Planner(Costs(curve(*FLAT), curve((1, 0.2), (2, 0.2), (4, 0.3), (16, 0.9))), sampled=False)
    for _ in range(40):
        budget.observe_level(1, 16, 0.9)
    assert budget.level(1) == pytest.approx(0.2)
    budget.plan = budget.plan._replace(floor=math.log(0.5))
    for _ in range(40):
        budget.observe_level(2, 8, 0.5)
    assert budget.width == pytest.approx(4, rel=0.02)
    assert budget.level(1) == pytest.approx(0.3, rel=0.02)


def test_what_was_learnt_is_written_and_read():
    budget = planner((1, 1.0), (100, 2.0))
    for _ in range(30):
        plan, nodes = step(budget, 0.7)
        budget.observe_step(1 + nodes, 0, 1.0, -0.01 if plan.levels else 0.3, drafted=plan.levels > 0)
    budget.verified(torch.full((9,), 0.5), torch.ones(9).long(), torch.ones(9).bool(), torch.ones(9).bool())
    written = json.loads(json.dumps(budget.to_json()))
    other = planner((1, 1.0), (100, 2.0))
    other.restore(written)
    assert other.to_json() == written
    assert other.overhead(drafted=True) == -0.01
    assert planner(*FLAT).to_json()["overhead"] == {"drafting": [], "plain": []}


def test_what_drafting_saves_elsewhere_is_no_time_of_a_plain_step():
    """The roots' forward may take less than a level of the draft."""
    budget = planner((1, 0.005), (100, 0.04), level=0.001)
    budget.observe_step(4, 0, 0.005, -0.05, drafted=True)
    assert budget.plain_step_seconds(1) == pytest.approx(0.005)
    assert budget.begin([False]).price > 0


def test_a_size_that_loses_is_tried_again_while_another_wins():
    budget = planner((1, 1.0), (8, 1.1), (32, 2.0), (64, 3.2), (1000, 70.0), level=0.1)
    tried = []
    for _ in range(30):
        drafted(budget, 0.6, 20)
        tried += drafted(budget, 0.6, 20, greedy=32)
    assert 2 <= len(tried) < 60


def test_a_rank_that_hears_no_times_looks_for_none():
    """Ranks that must agree are told no seconds: what they cannot learn they do not try."""
    budget = planner(*((rows, 1.0) for rows in range(1, 200, 8)), level=1e-3)
    plans = [step(budget, 0.8, greedy=8)[0] for _ in range(300)]
    assert all(plan.levels and plan.most is None for plan in plans)


def test_a_kind_that_was_never_seen_gets_all_nodes_that_could_pay():
    budget = planner((1, 1.0), (200, 10.0), level=0.001)
    for _ in range(100):
        step(budget, 0.7, greedy=8)
    plan = step(budget, 0.7, greedy=0, sampled=8)[0]
    assert plan.levels > 1
    assert math.exp(plan.floor) == pytest.approx(plan.price * 9 / 199, rel=0.01)


@pytest.mark.parametrize("wrong", [{}, {"calibrations": []}, {"overhead": {"plain": "fast"}}, {"overhead": []}])
def test_what_was_not_written_by_it(wrong: dict[str, Any]):
    good = planner(*FLAT).to_json()
    with pytest.raises((ValueError, TypeError)):
        planner(*FLAT).restore({**good, **wrong} if wrong else {})


def test_a_backoff_doubles_up_to_a_bound():
    backoff = Backoff(2, RETRY_AFTER)
    due = [n for n in range(20000) if backoff.due(2)]
    assert due[:4] == [2, 3, *due[2:4]] or due[:2] == [1, 2]
    gaps = [b - a for a, b in pairwise(due) if b - a > 1]
    assert max(gaps) <= MAX_BACKOFF + 2
    assert [round(b / a) for a, b in pairwise(gaps)][:4] == [2, 2, 2, 2]


def test_a_curve_of_two_points_is_enough():
    Planner(Costs(Curve([1, 2], [1.0, 1.0]), Curve([1, 2], [1.0, 1.0])), sampled=True).begin([True])


# What look-ups bring.


def found(budget: Planner, *, brings: float, drafted: float = 0.0) -> tuple[Plan, int]:
    """A step of one request: a look-up brings chains of four nodes of this value, and the draft one more first token
    with chains below."""
    plan = budget.begin([True])
    levels = min(8, plan.levels) if drafted else 0
    values = [brings] * 4 + [drafted**depth for depth in range(1, levels + 1)]
    depth = torch.tensor([1, 2, 3, 4, *range(1, levels + 1)])
    value, order = torch.tensor(values, dtype=torch.float64).sort(descending=True, stable=True)
    level = torch.where(order < 4, 0, depth[order])
    greedy = torch.tensor([True])
    budget.observe_trees(value[None], depth[order][None], greedy, plan, level=level[None])
    return plan, int(budget.share(value[None], depth[order][None], greedy).sum())


@pytest.mark.parametrize("brings", [0.9, 0.01])
def test_a_look_up_is_verified_while_a_dear_draft_rests(brings: float):
    budget = planner((1, 1.0), (2, 1.1), (100, 11.0), level=5.0)
    steps = [found(budget, brings=brings, drafted=0.5) for _ in range(60)]
    assert all(plan.levels == 0 for plan, _ in steps)
    assert {nodes for _, nodes in steps[8:]} == ({4} if brings > 0.1 else {0})
    best = (1 + 4 * brings) / 1.4 if brings > 0.1 else 1.0
    assert steps[-1][0].price == pytest.approx(best, rel=0.1)


@pytest.mark.parametrize(("brings", "drafts"), [(0.9, False), (0.01, True)])
def test_a_draft_is_compared_with_what_the_look_up_brings_without_it(brings: float, drafts: bool):
    """A draft that is sure of two tokens at a quarter of a forward each pays beside nothing, not beside a copy."""
    budget = timed(planner((1, 1.0), (5, 1.0), (6, 2.0), (100, 100.0), level=0.25))
    plans = [found(budget, brings=brings, drafted=0.6)[0] for _ in range(40)]
    assert (sum(plan.levels > 0 for plan in plans[-20:]) > 10) == drafts


@pytest.mark.parametrize(("level", "drafts"), [(0.03, True), (0.08, False)])
def test_a_cheap_draft_goes_on_beside_a_copy(level: float, drafts: bool):
    """It brings nothing while the copy lasts; nobody knows when that ends."""
    budget = timed(planner((1, 1.0), (5, 1.0), (6, 2.0), (100, 100.0), level=level))
    plans = [found(budget, brings=0.9, drafted=0.6)[0] for _ in range(40)]
    assert (sum(plan.levels > 0 for plan in plans[-20:]) > 10) == drafts


def test_nodes_of_a_look_up_are_no_levels():
    """They are as deep as they are: the draft's own depth is what pays for it."""
    budget = timed(planner((1, 1.0), (100, 1.001), level=0.2))
    with_look_up = [found(budget, brings=0.1, drafted=0.5)[0] for _ in range(6 * EVERY)]
    other = timed(planner((1, 1.0), (100, 1.001), level=0.2))
    alone = [step(other, 0.5)[0] for _ in range(6 * EVERY)]
    deepest = [
        max((plan.levels for plan in plans[2 * EVERY :] if not plan.deep), default=0) for plans in (with_look_up, alone)
    ]
    assert 0 < deepest[0] <= deepest[1]


def test_what_a_look_up_brings_is_hoped_for_beside_a_draft_that_nobody_knows():
    """Or no draft would be tried where copies are better than any hope for one."""
    budget = timed(planner((1, 1.0), (100, 1.001), level=0.01))
    for _ in range(3):
        found(budget, brings=0.95)
    budget.known[1] = 0.0
    budget._plans.clear()
    assert found(budget, brings=0.95)[0].levels > 0


def test_where_look_ups_are_all_there_is_nothing_is_drafted_or_probed():
    """The price of a row is what the look-ups bring."""
    costs = Costs(curve((1, 1.0), (100, 10.0)), curve((1, 0.05), (1000, 0.05)))
    budget = timed(Planner(costs, sampled=False, drafts=False))
    depth, value = torch.tensor([[1, 2, 3]]), torch.tensor([[0.9, 0.8, 0.01]])
    greedy, kept = torch.tensor([True]), list[int]()
    assert budget.begin([True]).levels == 0, "from the first step"
    for _ in range(2 * PROBE_EVERY):
        plan = budget.begin([True])
        budget.observe_trees(value, depth, greedy, plan, level=torch.zeros_like(depth))
        kept.append(int(budget.share(value, depth, greedy).sum()))
        assert plan.levels == 0
    assert set(kept) == {2}
    assert budget.plan.price > 2 / costs.verify.cost(3)
    assert Budget(sampled=False, most=4, drafts=False).begin([True]) == Plan(0, 0.0, most=4)


@pytest.mark.parametrize("seed", range(40))
def test_a_look_up_that_cannot_pay_gets_no_row(seed):
    """Whatever its nodes; and the likeliest get rows where it can."""
    random = np.random.default_rng(seed)
    seconds = np.sort(random.uniform(0.1, 1, 5))
    budget = planner(*zip((1, 2, 4, 9, 16), seconds, strict=True))
    greedy = [True] * 3
    budget.plan = budget.plan._replace(price=random.uniform(0.1, 20))
    pays = budget.look_up_pays(greedy, 4)
    likeliest = budget.share(np.ones((3, 4)), np.full((3, 4), -1), greedy)
    assert pays == bool(likeliest.any())
    if not pays:
        deep = np.tile(-np.arange(1, 5), (3, 1))
        assert not budget.share(random.uniform(0, 1, (3, 4)), deep, greedy).any()


def test_look_ups_that_do_not_pay_are_tried():
    """A text begins to repeat itself, after its look-ups have been wrong."""
    verify = curve(*((rows, 0.02 + 0.0005 * rows) for rows in (1, 8, 16, 32, 64, 128)))
    budget = Planner(Costs(verify, curve((1, 0.001), (1000, 0.001)), 0.0), sampled=False, drafts=False)
    random, greedy = np.random.default_rng(0), [True] * 16
    value, depth = np.full((16, 4), 0.9) ** np.arange(1, 5), np.tile(-np.arange(1, 5), (16, 1))
    level, tried = np.zeros((16, 4), int), [0, 0]
    for step in range(12000):
        rate = 0.05 if step < 4000 else 0.95
        budget.begin(greedy)
        kept = np.zeros(16, int)
        if budget.look_up_pays(greedy, 4):
            budget.observe_trees(value, depth, greedy, budget.plan, level=level)
            kept = budget.share(value, depth, greedy)
        else:
            budget.verifying = 0
        there = np.arange(4) < kept[:, None]
        hits = (random.random((16, 4)) < rate).cumprod(1).astype(bool)
        budget.verified(value[there], depth[there], hits[there], np.ones(kept.sum(), bool))
        rows = 16 + int(kept.sum())
        budget.observe_step(rows, 0, 0.02 + 0.0005 * rows, 0.001, drafted=False)
        tried[step >= 4000] += int(kept.sum())
    assert 0 < tried[0] < 200, "nodes of 4,000 steps"
    assert kept.min() > 0, "of each request"


def test_a_look_up_beside_requests_without_trees_starts_at_their_rows():
    """Where rows are free up to eight, they have taken those."""
    budget = planner((1, 1.0), (8, 1.0), (16, 9.0))
    budget.plan = budget.plan._replace(price=1.0)
    assert budget.look_up_pays([True], 4)
    assert not budget.look_up_pays([True], 4, rows=7)


def test_whether_a_look_up_pays_is_asked_anew():
    """When plans are: a resting batch's every 16 steps."""
    budget = planner((1, 1.0), (2, 2.0), (100, 100.0))
    budget.begin([True])
    assert not budget.look_up_pays([True], 8), "a node costs what a token does"
    for _ in range(200):
        budget.costs.verify.observe(1, 1.0)
        budget.costs.verify.observe(2, 1.0)
    assert not budget.look_up_pays([True], 8)
    for _ in range(16):
        budget.begin([True])
    assert budget.look_up_pays([True], 8)
