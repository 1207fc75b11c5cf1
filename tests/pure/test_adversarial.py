"""Hard cases for a rule: distributions that are certain, have no token in common, are tied, have hardly any mass, or
are equal; and a cut that requires the target's. All by enumeration, with every cut of the scheduler."""

from itertools import product

import pytest
import torch

from vllm_adaptive_tree.acceptance import legal_rules
from vllm_adaptive_tree.proposers import Proposer
from vllm_adaptive_tree.testing.drafts import Drafts, cut
from vllm_adaptive_tree.testing.models import ToyLM, histories
from vllm_adaptive_tree.trees import Shape

from .test_pairs import (
    BIASED,
    CHOSEN,
    DYSPEC,
    EXACT,
    KINDS,
    LEGAL,
    Change,
    Models,
    bias,
    static,
    stopping,
    strangers,
)

TINY, LITTLE = 1e-13, 1e-11  # less than `rng.EXHAUSTED`, and more
LAWS = {
    "certain": [1.0, 0.0, 0.0],
    "certain of another": [0.0, 0.0, 1.0],
    "two of three": [0.5, 0.5, 0.0],
    "the other two": [0.0, 0.25, 0.75],
    "all equal": [1.0, 1.0, 1.0],
    "hardly any mass": [1.0, TINY, TINY],
    "hardly any mass elsewhere": [TINY, TINY, 1.0],
    "hardly any mass once": [0.75, LITTLE, 0.25],
}
PAIRS = list(product(LAWS.values(), repeat=2))  # of a draft and its target, equal ones among them
HISTORIES = 1 + 3 + 9 + 27  # of models of three tokens and three levels


def adversaries(stride: int) -> Models:
    """A pair of models for each pair of laws i: i at the root, i + stride * h behind history h."""
    laws = torch.tensor(PAIRS, dtype=torch.float64)  # [P, 2, V]
    which = (torch.arange(len(PAIRS))[:, None] + stride * torch.arange(HISTORIES)) % len(PAIRS)
    draft, target = ([ToyLM(one) for one in laws[which, side].log()] for side in (0, 1))
    return draft, target


PROPOSERS = {
    **CHOSEN,
    **DYSPEC,
    **{f"binary {kind}": lambda kind=kind: static(kind, Shape.named("binary", 4)) for kind in KINDS},
    **{f"three {kind}": lambda kind=kind: static(kind, Shape.k_config([3, 1])) for kind in KINDS},
    **{f"mcsd {kind}": lambda kind=kind: stopping(kind) for kind in KINDS},
}


def rules(name: str) -> list[str]:
    proposer: Proposer = PROPOSERS[name]()
    return list(legal_rules((proposer.kind,), proposer.max_children))


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name in PROPOSERS for rule in rules(name)])
def test_laws_that_a_rule_may_stumble_over(name, rule):
    worst = bias(PROPOSERS[name](), rule, nodes=4, pairs=adversaries(stride=5), temperature=1.0)
    assert worst.max() < EXACT


def refused(pairs: Models) -> Change:
    """Every tree up to its first token that the target cannot give: what the scheduler leaves of one with a grammar."""
    p = torch.stack([target.probs for target in pairs[1]])

    def change(drafts: Drafts) -> Drafts:
        tree = drafts.tree
        above = histories(tree, p.shape[2]).gather(1, tree.parent + 1)
        chance = p[drafts.group[:, None], above, tree.tokens.clamp(min=0)]
        return cut(drafts, (chance > 0).int().cumprod(1).sum(1))

    return change


@pytest.mark.parametrize(("kind", "rule"), LEGAL)
def test_what_a_grammar_leaves_is_for_the_target_s_own_draws(kind, rule):
    """A chosen tree may be cut by anything. Of a drawn one a rule asks what was refused as well."""
    draft, target = strangers(vocabulary=3, depth=2, count=8)
    for one in target:
        one.logits[:, 1] = -torch.inf
    pairs = draft, [ToyLM(one.logits) for one in target]
    worst = bias(static(kind, Shape.k_config([2, 1])), rule, nodes=4, pairs=pairs, change=refused(pairs)).max()
    assert (worst < EXACT) if rule == "target_only" or kind == "one_hot" else (worst > BIASED)
