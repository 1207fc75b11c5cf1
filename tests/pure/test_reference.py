"""The reference decodes the target's distribution, for every kind of rule, and a greedy step is the argmax path."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.proposers import StaticTree
from vllm_adaptive_tree.proposers.dyspec import DySpec
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.reference import Step, decode_step
from vllm_adaptive_tree.testing.models import ToyLM
from vllm_adaptive_tree.trees import Shape

VOCABULARY, DEPTH, STEPS = 3, 4, 500
RARE = 13.8  # chi-square with two degrees of freedom: one in a thousand
PROMPT = [2]


class Model:
    """A toy model with the interface of a Hugging Face model."""

    def __init__(self, toy: ToyLM):
        self.toy = toy

    def __call__(self, sequence: Tensor) -> SimpleNamespace:
        path = sequence[0, len(PROMPT) :].tolist()
        return SimpleNamespace(logits=self.toy.logits[self.toy.history(path)][None, None])


def pair(seed: int) -> tuple[ToyLM, ToyLM]:
    draft = ToyLM.random(VOCABULARY, DEPTH, seed=seed, scale=1.0)
    return ToyLM(draft.logits + ToyLM.random(VOCABULARY, DEPTH, seed=seed + 100, scale=0.7).logits), draft


PROPOSERS = {
    "target_only": lambda: OptTree(max_depth=2, threshold=0.0),
    "rrsw": lambda: DySpec(max_depth=2, max_children=2, threshold=0.1),
    "k_seq": lambda: StaticTree(Shape.k_config((2, 1))),
    "traversal": lambda: StaticTree(Shape.k_config((2, 1))),
}


def step(rule: str, seed: int, toys: tuple[ToyLM, ToyLM], **options: float) -> Step:
    proposer = PROPOSERS[rule]()
    proposer.kind = RULES[rule].kind_of(proposer.kinds)
    target, draft = map(Model, toys)
    return decode_step(target, draft, PROMPT, proposer=proposer, rule=rule, nodes=4, seed=seed, **options)


def chi2(counts: Tensor, logits: Tensor, temperature: float) -> float:
    expected = (logits / temperature).softmax(-1) * counts.sum()
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("rule", PROPOSERS)
def test_the_first_token_follows_the_target(rule: str) -> None:
    toys, counts, accepted = pair(3), torch.zeros(VOCABULARY), 0
    for seed in range(STEPS):
        emitted = step(rule, seed, toys, temperature=0.8, draft_temperature=0.9).emitted
        counts[emitted[0]] += 1
        accepted += len(emitted) - 1
    target, draft = (toy.logits[0] for toy in toys)
    assert chi2(counts, target, 0.8) < RARE
    assert chi2(counts, draft, 0.9) > RARE, "not that of the draft"
    assert accepted > STEPS / 3


@pytest.mark.parametrize("rule", PROPOSERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_greedy_step_emits_the_argmax_path(rule: str, seed: int) -> None:
    toys = target, _ = pair(seed)
    found = step(rule, seed, toys, temperature=0.0)
    path: list[int] = []
    for token in found.emitted:
        assert token == target.logits[target.history(path)].argmax()
        path.append(token)
    assert len(found.tokens) == len(found.parents) > 0
