"""A third engine runs `TreeStep`: two Hugging Face models without a cache. Each step equals that of the reference."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.pure.test_reference import PROMPT, PROPOSERS, VOCABULARY
from vllm_adaptive_tree.acceptance import RULES, Accepted
from vllm_adaptive_tree.drafters import Continuations
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.proposers import Proposal, Request, draft_tree
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.reference import PathDrafter, decode_step, last_logits
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.step import TreeStep
from vllm_adaptive_tree.trees import TreeBatch

NODES, TEMPERATURE = 4, 0.8


class Bigram:
    """A model with the interface of a Hugging Face model, whose logits follow from the last token."""

    def __init__(self, seed: int):
        self.logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))

    def __call__(self, sequence: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits[sequence])


class Drafted(NamedTuple):
    """The tree of one request, and the draft's logits of its slots [S, V]."""

    tree: TreeBatch
    read: Tensor
    planned: Tensor
    logits: Tensor
    levels: int
    max_children: int = NODES
    chosen: None = None

    @property
    def initial(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64)

    def draft_probs(self, node: Tensor) -> tuple[Tensor, Tensor]:
        slot = 0 if node < 0 else int(self.read[0, node])
        q = softmax_at(self.logits[[max(slot, 0)]], torch.ones(1))
        return q.masked_fill(torch.tensor(slot < 0), 0.0), self.planned[:, int(node) + 1]


class PlainEngine:
    """Decoding of one request whose state is its sequence of tokens. It is all four ports but the trees."""

    nodes, limits = NODES, None
    rules: Any = {}  # noqa: RUF012
    all_from_target, from_target = False, None

    def __init__(self, target: Any, draft: Any, proposer: Any, seed: int):
        self.model, self.draft, self.proposer, self.seed = target, draft, proposer, seed
        self.sequence, self.drafted = list(PROMPT), list[Drafted]()

    def rng(self, purpose: int) -> CounterRNG:
        return CounterRNG(torch.tensor([self.seed]), torch.tensor([len(self.sequence) - 1]), purpose)

    # -- Engine
    def lay_out(self, batch: Any) -> Drafted:
        return self.drafted[-1]

    def agreed(self, verification: Drafted, accepted: Accepted) -> Accepted:
        return accepted

    def commit(self, verification: Drafted, nodes: Tensor) -> None:
        self.sequence += verification.tree.tokens[0, nodes[0][nodes[0] >= 0]].tolist()

    def observe(self, verification: Drafted, accepted: Accepted) -> None:
        self.sequence.append(int(accepted.tokens[0][accepted.tokens[0] >= 0][-1]))

    # -- Target
    def probs(self, node: Tensor, active: Tensor) -> Tensor:
        tree, path, at = self.drafted[-1].tree, list[int](), int(node)
        while at >= 0:
            path, at = [int(tree.tokens[0, at]), *path], int(tree.parent[0, at])
        return softmax_at(last_logits(self.model, [*self.sequence, *path])[None], torch.tensor([TEMPERATURE]))

    def draw(self, node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("no request takes the engine's own samples")

    def draw_by(self, choose: Any, node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        return choose(self.probs(node, active), lambda: self.draw(node, active)[0]), torch.ones_like(active)

    def proceed(self, active: Tensor) -> bool:
        return bool(active)

    def walk_at_once(self, verification: Drafted) -> None:
        return None

    def rule_at_once(self, *_: Any) -> None:
        return None

    def emit(self, verification: Drafted, paths: Accepted, from_target: Tensor | None) -> Accepted:
        return paths

    # -- Draft
    def begin(self) -> int:
        return self.proposer.max_depth

    def read(self, accepted: Accepted | None, levels: int) -> bool:
        self.rows, self.state = (reader := PathDrafter(self.draft)).catch_up(self.sequence)
        self.reader = reader
        return True

    def grow(self, levels: int) -> Proposal:
        self.logits = list[Tensor]()
        request = Request(torch.ones(1), torch.tensor([False]), self.rng(0))
        models = self.reader, self.rows, self.state
        return draft_tree(self.proposer, *models, nodes=NODES, request=request, keep=self.logits.append)

    def empty(self) -> Proposal:
        raise AssertionError("the draft never rests")

    def continuations(self, levels: int) -> Continuations | None:
        return None

    def keep(self, proposal: Proposal, merged: Continuations | None) -> None:
        tree, read, planned, *_ = proposal
        self.drafted.append(Drafted(tree, read, planned, torch.cat(self.logits, 1)[0], int(tree.depth.max())))

    def end(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", PROPOSERS)
def test_steps_are_those_of_the_reference(rule: str, seed: int) -> None:
    target, draft = Bigram(seed), Bigram(seed)
    target.logits = target.logits + 0.5 * Bigram(100 + seed).logits
    proposer = PROPOSERS[rule]()
    proposer.kind = RULES[rule].kind_of(proposer.kinds)
    engine = PlainEngine(target, draft, proposer, seed)
    step = TreeStep(Pair(proposer, rule, RULES[rule], None, min(NODES, proposer.max_children)), engine)
    step.draft(engine)
    for _ in range(3):
        before = list(engine.sequence)
        options = {"proposer": proposer, "rule": rule, "nodes": NODES, "temperature": TEMPERATURE, "seed": seed}
        expected = decode_step(target, draft, before, **options)
        verification = step.verify(None)
        assert verification.tree.tokens[0, : len(expected.tokens)].tolist() == expected.tokens
        assert verification.tree.parent[0, : len(expected.tokens)].tolist() == expected.parents
        step.accept(engine, engine)
        step.commit()
        assert engine.sequence == before + expected.emitted
        step.draft(engine)
        step.end()
        assert step.verification is None
