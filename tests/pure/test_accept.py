"""Acceptance of a batch: its output's distribution by enumeration, and which draws decide."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.pure.test_no_host_sync import NoHostSync
from tests.pure.test_pairs import BIASED, EXACT, LEGAL, bias, static
from vllm_adaptive_tree.acceptance import RULES, Accepted
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.proposers import StaticTree
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.step import walked
from vllm_adaptive_tree.step.accept import accept
from vllm_adaptive_tree.testing import steps
from vllm_adaptive_tree.testing.drafts import Drafts as Drafted
from vllm_adaptive_tree.trees import Shape, TreeBatch


class Trees(NamedTuple):
    """Trees of a verification, with q [R, 1 + N, V] and the children planned [R, 1 + N]; nodes with q = 0 are not
    read."""

    tree: TreeBatch
    q: Tensor
    planned: Tensor
    levels: int
    max_children: int
    chosen: None = None

    @property
    def initial(self) -> Tensor:
        return torch.zeros_like(self.tree.tokens[:, 0])

    def draft_probs(self, node: Tensor) -> tuple[Tensor, Tensor]:
        row = torch.arange(len(node))
        return self.q[row, node + 1], self.planned[row, node + 1]


class Table:
    """Target with known distributions [R, 1 + N, V]; its own draw is always the token `own`."""

    rules: Any = {}  # noqa: RUF012

    def __init__(self, p: Tensor, own: int = 0):
        self.p, self.own = p, own

    def probs(self, node: Tensor, active: Tensor) -> Tensor:
        return self.p[torch.arange(len(node)), node + 1]

    def draw(self, node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(node, self.own), torch.ones_like(active)

    def draw_by(self, choose: Any, node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        return choose(self.probs(node, active), lambda: self.draw(node, active)[0]), torch.ones_like(active)

    def proceed(self, active: Tensor) -> bool:
        return True

    def walk_at_once(self, verification: Trees) -> None:
        return None

    def rule_at_once(self, *_: Any) -> None:
        return None

    def emit(self, verification: Trees, paths: Accepted, from_target: Tensor | None) -> Accepted:
        if from_target is None:
            return paths
        walks = walked(self.draw, self, verification)
        return Accepted(*(torch.where(from_target[:, None], *pair) for pair in zip(walks, paths, strict=True)))


class Known:
    """Requests of which some take the target's own draws."""

    def __init__(self, own: list[bool], rng: Any):
        self.all_from_target, self.random = all(own), rng
        self.from_target = torch.tensor(own) if any(own) else None

    def rng(self, purpose: int) -> Any:
        return self.random


def by_the_step(drafts: Drafted, p: Tensor, rule: Any, kind: Any, rng: Any) -> Any:
    pair = Pair(StaticTree(Shape.named("binary", 2), kind=kind), rule.__name__, rule, None, drafts.most)
    trees = Trees(drafts.tree, drafts.q, drafts.drawn, int(drafts.tree.depth.max()), drafts.most)
    accepted = accept(pair, Table(p), trees, Known([False] * len(p), rng))
    return accepted if rule.draw else steps.replayed(drafts.tree, accepted.tokens)


@pytest.mark.parametrize(("kind", "rule"), [(kind, rule) for kind, rule in LEGAL if rule != "target_only"])
def test_the_law_is_the_target_s(kind: Any, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pure = bias(static(kind, Shape.k_config([2, 1])), rule, nodes=4)
    assert pure.max() < EXACT
    monkeypatch.setattr(steps, "verify", by_the_step)
    assert bias(static(kind, Shape.k_config([2, 1])), rule, nodes=4).max() < EXACT


def test_a_wrong_pair_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "verify", by_the_step)
    wrong = bias(static("one_hot", Shape.k_config([2, 1])), "rrsw", nodes=4)
    assert wrong.max() > BIASED


def batch() -> tuple[Trees, Tensor]:
    """Two requests: a root with the children 1 and 2, and 0 below 1; p [2, 4, 5]."""
    tree = TreeBatch(
        torch.tensor([[1, 2, 0]] * 2), torch.tensor([[-1, -1, 0]] * 2), torch.tensor([[1, 1, 2]] * 2), torch.zeros(2, 3)
    )
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(2, 4, 5, generator=generator).softmax(-1) for _ in range(2))
    q[:, 2:] = 0.0
    return Trees(tree, q, torch.tensor([[2, 1, 0, 0]] * 2), 2, 2), p


def pair_of(rule: str) -> Pair:
    return Pair(StaticTree(Shape.named("binary", 2), kind=RULES[rule].kinds[0]), rule, RULES[rule], None, 2)


def rng() -> CounterRNG:
    return CounterRNG(torch.tensor([3, 4]), torch.tensor([9, 9]), purpose=1)


@pytest.mark.parametrize("rule", RULES)
def test_requests_with_their_own_draws(rule: str) -> None:
    """The second one takes token 2 wherever it is, the first does not notice."""
    trees, p = batch()

    def run(own: list[bool]) -> Any:
        return accept(pair_of(rule), Table(p, own=2), trees, Known(own, rng()))

    mixed, alone = run([False, True]), run([False, False])
    assert mixed.tokens[1].tolist() == [2, 2, -1]
    assert mixed.nodes[1].tolist() == [1, -1, -1]
    assert mixed.tokens[0].tolist() == alone.tokens[0].tolist()
    assert run([True, True]).tokens.tolist() == [[2, 2, -1]] * 2


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_read_on_the_host(rule: str) -> None:
    trees, p = batch()
    requests = Known([False] * 2, rng())
    with NoHostSync():
        accept(pair_of(rule), Table(p), trees, requests)
