"""Acceptance on the device: the law of its output by enumeration, and whose draws decide."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.oracles import steps
from tests.oracles.drafts import Drafts as Drafted
from tests.pure.test_no_host_sync import NoHostSync
from tests.pure.test_pairs import BIASED, EXACT, LEGAL, bias, static
from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.engine.v2.acceptance import accept
from vllm_adaptive_tree.engine.v2.drafts import DraftProbs, Drafts
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.proposers import Proposal, StaticTree
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.trees import Shape, TreeBatch


class Table:
    """A target whose laws are given, [R, 1 + N, V]."""

    def __init__(self, p: Tensor, own: int = 0):
        self.p, self.own = p, own

    def probs(self, node: Tensor) -> Tensor:
        return self.p[torch.arange(len(node)), node + 1]

    def draw(self, node: Tensor) -> Tensor:
        return torch.full_like(node, self.own)


def draft_probs(drafts: Drafted) -> DraftProbs:
    requests = torch.arange(len(drafts.weight))
    there = drafts.q.sum(-1) > 0
    slot = torch.arange(there.shape[1]).expand_as(there).masked_fill(~there, -1)
    return DraftProbs(drafts.q.log(), torch.ones(len(requests), dtype=torch.float64), requests, slot, drafts.drawn)


def by_the_adapter(drafts: Drafted, p: Tensor, rule: str, kind: Any, rng: Any) -> Any:
    proposer = StaticTree(Shape.named("binary", 2), kind=kind)
    pair = Pair(proposer, rule, RULES[rule], None, drafts.most)
    own = np.zeros(len(p), dtype=bool)
    levels = int(drafts.tree.depth.max())
    found = accept(pair, Table(p), drafts.tree, draft_probs(drafts), rng, own, levels=levels)  # type: ignore[arg-type]
    return found if RULES[rule].draw else steps.replayed(drafts.tree, found.tokens)


@pytest.mark.parametrize(("kind", "rule"), [(kind, rule) for kind, rule in LEGAL if rule != "target_only"])
def test_the_law_is_the_target_s(kind: Any, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pure = bias(static(kind, Shape.k_config([2, 1])), rule, nodes=4)
    assert pure.max() < EXACT
    monkeypatch.setattr(steps, "verify", by_the_adapter)
    assert bias(static(kind, Shape.k_config([2, 1])), rule, nodes=4).max() < EXACT


def test_a_wrong_pair_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "verify", by_the_adapter)
    wrong = bias(static("one_hot", Shape.k_config([2, 1])), "rrsw", nodes=4)
    assert wrong.max() > BIASED


def batch() -> tuple[TreeBatch, DraftProbs, Tensor]:
    """Two requests: a root with the children 1 and 2, and 0 below 1."""
    tree = TreeBatch(
        torch.tensor([[1, 2, 0]] * 2), torch.tensor([[-1, -1, 0]] * 2), torch.tensor([[1, 1, 2]] * 2), torch.zeros(2, 3)
    )
    generator = torch.Generator().manual_seed(0)
    p, logits = (torch.randn(2, 4, 5, generator=generator) for _ in range(2))
    slot, drawn = torch.tensor([[0, 1, -1, -1]] * 2), torch.tensor([[2, 1, 0, 0]] * 2)
    return tree, DraftProbs(logits, torch.ones(2), torch.arange(2), slot, drawn), p.softmax(-1)


@pytest.mark.parametrize("rule", RULES)
def test_requests_with_their_own_draws(rule: str) -> None:
    """The second one takes token 2 wherever it is, the first does not notice."""
    tree, draft, p = batch()
    pair = Pair(StaticTree(Shape.named("binary", 2), kind=RULES[rule].kinds[0]), rule, RULES[rule], None, 2)

    def run(own: list[bool]) -> Any:
        rng = CounterRNG(torch.tensor([3, 4]), torch.tensor([9, 9]), purpose=1)
        return accept(pair, Table(p, own=2), tree, draft, rng, np.array(own), levels=2)  # type: ignore[arg-type]

    mixed, alone = run([False, True]), run([False, False])
    assert mixed.tokens[1].tolist() == [2, 2, -1]
    assert mixed.nodes[1].tolist() == [1, -1, -1]
    assert mixed.tokens[0].tolist() == alone.tokens[0].tolist()
    assert run([True, True]).tokens.tolist() == [[2, 2, -1]] * 2


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_read_on_the_host(rule: str) -> None:
    tree, draft, p = batch()
    pair = Pair(StaticTree(Shape.named("binary", 2), kind=RULES[rule].kinds[0]), rule, RULES[rule], None, 2)
    rng = CounterRNG(torch.tensor([3, 4]), torch.tensor([9, 9]), purpose=1)
    with NoHostSync():
        accept(pair, Table(p), tree, draft, rng, np.zeros(2, dtype=bool), levels=2)  # type: ignore[arg-type]


def test_trees_wait_for_their_request() -> None:
    """By vLLM's index; of a request that was not in the last batch, or whose root is another one, nothing is left."""
    tree, _, _ = batch()
    drafts = Drafts(4, 3, torch.device("cpu"))
    everyone = torch.arange(4)
    with NoHostSync():
        empty, _ = drafts.of(everyone, everyone, torch.full((4,), 3))
    assert not empty.valid.any()

    read, drawn = torch.tensor([[1, -1, -1], [2, -1, -1]]), torch.tensor([[2, 1, 0, 0]] * 2)
    levels = [torch.arange(4.0).reshape(2, 1, 2), torch.arange(8.0).reshape(2, 2, 2)]
    with NoHostSync():
        drafts.open(2, sum(level.shape[1] for level in levels))
        for first, level in enumerate(levels):
            drafts.keep(level, first)
        drafts.store(torch.tensor([2, 0]), torch.tensor([7, 8]), Proposal(tree, read, drawn), torch.ones(2))
        found, probs = drafts.of(everyone, torch.tensor([8, 8, 6, 7]), torch.tensor([2, 3, 3, 3]))
    assert found.tokens.tolist() == [[1, 2, -1], [-1] * 3, [-1] * 3, [-1] * 3]
    found, probs = drafts.of(torch.tensor([0, 2]), torch.tensor([8, 7]), torch.tensor([3, 3]))
    assert found.tokens.tolist() == [[1, 2, 0]] * 2
    q, count = probs.after(torch.tensor([-1, 0]))
    assert count.tolist() == [2, 1]
    assert torch.equal(q, torch.stack([levels[0][1, 0].softmax(0), levels[1][0, 0].softmax(0)]))
    q, count = probs.after(torch.tensor([0, 1]))
    assert torch.equal(q[0], levels[1][1, 1].softmax(0))
    assert (q[1].tolist(), count.tolist()) == ([0.0, 0.0], [1, 0])
