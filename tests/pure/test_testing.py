"""The checks for authors of rules and proposers pass what is right, and name what is wrong."""

from pathlib import Path

import pytest
import torch

from vllm_adaptive_tree.acceptance import RULES, Rule, TargetOnly
from vllm_adaptive_tree.acceptance.rrs import RRS, RRSw
from vllm_adaptive_tree.proposers import BestFirst, Candidates, StaticTree, best_candidates
from vllm_adaptive_tree.proposers.dyspec import DySpec
from vllm_adaptive_tree.proposers.eagle2 import Eagle2
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.testing import assert_lossless, assert_well_formed
from vllm_adaptive_tree.trees import Shape

LEGAL = [(name, kind) for name, rule in RULES.items() for kind in rule.kinds]


@pytest.mark.parametrize(("rule", "kind"), LEGAL)
def test_the_rules_are_lossless(rule, kind):
    assert_lossless(rule, kind)


@pytest.mark.parametrize(("rule", "kind"), [("rrsw", "iid"), ("k_seq", "hub_pair")])
def test_other_pairs_are_not(rule, kind):
    with pytest.raises(
        AssertionError, match=rf"{RULES[rule].__name__} is not lossless for {kind} children: total vari"
    ):
        assert_lossless(rule, kind)


class Hasty(Rule):
    """Takes the first child, if there is one."""

    kinds = ("iid",)

    @staticmethod
    def draw(p, q, children, rng):
        first = children.tokens[:, 0]
        return torch.where(first >= 0, first, rng.sample(p))


def test_a_wrong_rule_is_shown_with_its_case():
    with pytest.raises(AssertionError) as error:
        assert_lossless(Hasty, "iid")
    first, *rest = str(error.value).splitlines()
    assert first.startswith("Hasty is not lossless for iid children: total variation ")
    assert [line.split()[0] for line in rest] == ["children", "after", "q", "p", "emitted", "difference"]
    q, emitted = (line.split(maxsplit=1)[1] for line in (rest[2], rest[4]))
    assert q == emitted, "the first child of one is a sample of q"


class Outside(Rule):
    kinds = ("one_hot",)

    @staticmethod
    def draw(p, q, children, rng):
        return rng.sample(p) - 1


class Careless(Rule):
    """Divides by p, also where it is 0."""

    kinds = ("one_hot",)

    @staticmethod
    def draw(p, q, children, rng):
        return rng.sample(p * p / p)


def test_the_guide_shows_such_a_case():
    with pytest.raises(AssertionError) as error:
        assert_lossless("rrs", "without_replacement")
    assert f"```\n{error.value}\n```" in (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


def test_what_is_no_token_or_no_distribution_is_refused():
    with pytest.raises(AssertionError, match=r"Outside.draw must return a token from 0 to 2 .*, values \[-1, "):
        assert_lossless(Outside, "one_hot")
    with pytest.raises(AssertionError, match="Careless is not lossless"):
        assert_lossless(Careless, "one_hot")
    with pytest.raises(ValueError, match="children are a proposer or one of one_hot, .*, got 'sampled'"):
        assert_lossless(TargetOnly, "sampled")


def test_proposers_with_a_rule():
    assert_well_formed(StaticTree(Shape.k_config([3, 2, 2]), kind="iid"), nodes=12, vocabulary=3)
    dyspec = DySpec(max_depth=5, max_children=3, threshold=0.1)
    for proposer in (dyspec, OptTree(max_depth=9, threshold=0.0), Eagle2(max_depth=6, top_k=2)):
        assert_well_formed(proposer)
        assert_lossless("target_only", proposer)
        assert_lossless("traversal", proposer)
    assert dyspec.max_depth == 5
    with pytest.raises(AssertionError, match="DySpec drafts no node"):
        assert_lossless("target_only", DySpec(max_depth=2, max_children=2, threshold=2.0))
    assert_lossless(RRSw, dyspec, nodes=3)
    with pytest.raises(
        AssertionError, match=r"RRS is not lossless for without_replacement .*\n.* first nodes of DySpec's trees, "
    ):
        assert_lossless(RRS, dyspec, nodes=3)


class Broken(BestFirst):
    """Two children of each node; `fault`: what is wrong."""

    kinds = ("one_hot",)
    max_depth, max_children = 3, 2

    def __init__(self, fault):
        self.fault = fault

    @classmethod
    def build(cls, options, *, nodes):
        raise NotImplementedError

    def candidates(self, growth, logits):
        path = growth.front.path[:, : logits.shape[1], None]
        best = logits.log_softmax(-1).topk(3 if self.fault == "width" else 2)
        value = best.values + (0.0 if self.fault == "order" else path)
        if self.fault == "batch":
            value = value - growth.front.path.exp().sum() - logits[:, :, :1].mean().exp() * torch.rand(2)
        if self.fault == "dead":
            value = value.nan_to_num(neginf=-9.0)
        tokens = best.indices * 0 if self.fault == "twins" else best.indices
        column = torch.arange(logits.shape[1])[:, None].expand_as(tokens)
        columns = (part.flatten(1) for part in (tokens, column, value, value))
        return best_candidates(Candidates(*columns, 1 if self.fault == "planned" else 3), growth.nodes)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("order", "parents come first|was not read"),
        ("width", "3 children in place of 2"),
        ("planned", "2 of 1 planned children"),
        ("twins", "two nodes have the same path"),
        ("batch", "depends on the batch"),
        ("dead", "was not read|whose row is dead"),
    ],
)
def test_a_wrong_tree_is_named(fault, message):
    assert_well_formed(Broken("none"))
    with pytest.raises(AssertionError, match=message):
        assert_well_formed(Broken(fault))
