"""The distribution of what a batch emits that shares its nodes, exactly."""

from collections.abc import Callable

import pytest
import torch

from tests.pure.budget import PLATEAUS
from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.budget import allocate
from vllm_adaptive_tree.proposers import Proposer
from vllm_adaptive_tree.proposers.dyspec import DySpec
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.testing.drafts import cut, every_draft, stacked
from vllm_adaptive_tree.testing.models import ToyLM
from vllm_adaptive_tree.testing.steps import emitted


def joint_bias(
    proposer: Proposer,
    rule: str,
    pair: int,
    *,
    nodes: int = 4,
    least: tuple[float | None, ...] = (0.3,),
) -> tuple[float, set[tuple[int, int]]]:
    """Total variation between what two requests emit and what their targets say, and the numbers of nodes kept, after
    a cut to each `least` value; None: to the best rate."""
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
        law = emitted(cuts, [target], RULES[rule], proposer.kind, length=length).probs
        laws.append(law.unflatten(0, (nodes + 1, -1)).transpose(0, 1))
    joint, sizes = torch.zeros(laws[0].shape[2], laws[1].shape[2]).double(), set()
    values = [side.tree.log_weight.exp().double() for side in sides]
    for i, a in enumerate(values[0]):
        for j, b in enumerate(values[1]):
            both = torch.stack([a, b])
            for value in least:
                count = torch.from_numpy(allocate(both, verify=PLATEAUS, price=2.0, least=value))
                both = both.masked_fill(torch.arange(nodes) >= count[:, None], 0.0)
            kept = count.tolist()
            sizes.add(tuple(kept))
            weight = sides[0].weight[i] * sides[1].weight[j]
            joint += weight * laws[0][i, kept[0]][:, None] * laws[1][j, kept[1]]
    plain = targets[0].continuations(length)[:, None] * targets[1].continuations(length)
    return float((joint - plain).abs().sum() / 2), sizes


SAMPLED: dict[str, Callable[[], Proposer]] = {
    "heap": lambda: DySpec(max_depth=2, max_children=3, threshold=0),
    "threshold": lambda: DySpec(max_depth=2, max_children=2, threshold=0.05),
}


@pytest.mark.parametrize("rule", ["rrsw", "traversal", "target_only"])
@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_trees_that_share_a_budget_keep_the_distribution(name, rule):
    sizes = set()
    for pair in range(3):
        bias, kept = joint_bias(SAMPLED[name](), rule, pair)
        assert bias < 1e-9
        sizes |= kept
    assert len({sum(kept) for kept in sizes}) > 2, "the budget decides nothing here"
    assert len({a - b for a, b in sizes}) > 2, "the requests do not share it"


@pytest.mark.parametrize("rule", ["rrsw", "traversal", "target_only"])
def test_trees_cut_again_with_prompts_keep_the_distribution(rule):
    changed = 0
    for pair in range(3):
        _, once = joint_bias(SAMPLED["heap"](), rule, pair)
        bias, twice = joint_bias(SAMPLED["heap"](), rule, pair, least=(0.3, 0.45))
        assert bias < 1e-9
        changed += once != twice
        assert len(twice) > 1
    assert changed


def test_the_best_rate_of_sampled_trees_is_biased_on_plateaus():
    assert max(joint_bias(SAMPLED["heap"](), "rrsw", pair, least=(None,))[0] for pair in range(6)) > 1e-2


@pytest.mark.parametrize("rule", ["target_only"])
def test_chosen_trees_may_take_the_best_rate(rule):
    sizes = set()
    for pair in range(3):
        bias, kept = joint_bias(OptTree(max_depth=2, threshold=0.0), rule, pair, least=(None,))
        assert bias < 1e-9
        sizes |= kept
    assert sizes != {(0, 0)}
