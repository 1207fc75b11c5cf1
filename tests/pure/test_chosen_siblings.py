"""A text's continuation among drawn children keeps the target's law: all trees, all cuts, all coins, by enumeration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.pure.test_pairs import BIASED, adaptive, bias, models, reduced, strangers
from vllm_adaptive_tree.drafters import Continuations
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.adaptive_tree import AdaptiveTree
from vllm_adaptive_tree.proposers.merging import merge
from vllm_adaptive_tree.testing.lossless import EXACT

Change = Callable[[Proposal, Proposal], Proposal]
"""(merged, grown) -> what is verified."""

TEXTS: dict[str, tuple[list[list[int]], list[float]]] = {
    "likely": ([[0, 1, 2]], [0.8]),
    "unlikely": ([[2, 2]], [0.05]),
    "several": ([[0, 0, 1], [1, 2, -1], [0, 2, 0]], [0.4, 0.3, 0.1]),
    "certain": ([[1, 0, 1]], [1.0]),
    "none": ([[-1, -1]], [0.0]),
}


@dataclass
class Text:
    """Continuations of the text, beside trees of an adaptive proposer."""

    tokens: list[list[int]]
    weight: list[float]
    change: Change = lambda merged, grown: merged

    def on(self, proposer: AdaptiveTree) -> AdaptiveTree:
        grown = proposer.finish
        tokens = [chain[: proposer.max_depth] for chain in self.tokens]
        found = Continuations(torch.tensor([tokens]), torch.tensor([self.weight], dtype=torch.float64))

        def finish(growth: Any) -> Proposal:
            drawn = grown(growth)
            requests = len(drawn.tree.tokens)
            each = Continuations(*(part.expand(requests, *part.shape[1:]) for part in found))
            merged = merge(drawn, each, nodes=growth.nodes, most=growth.nodes, max_depth=proposer.max_depth)
            return self.change(merged, drawn)

        proposer.finish = finish  # type: ignore[method-assign]
        return proposer


@pytest.mark.parametrize("learnt", [True, False])
@pytest.mark.parametrize("name", TEXTS)
def test_continuations_among_drawn_children(name: str, learnt: bool) -> None:
    made = Text(*TEXTS[name]).on(adaptive(learnt=learnt))
    assert bias(made, "traversal", nodes=5).max() < EXACT


@pytest.mark.parametrize("name", TEXTS)
def test_flat_trees_and_a_reduced_vocabulary(name: str) -> None:
    assert bias(Text(*TEXTS[name]).on(adaptive(depth=2)), "traversal", nodes=4).max() < EXACT
    made = Text(*TEXTS[name]).on(adaptive(depth=2))
    assert bias(made, "traversal", nodes=4, pairs=reduced(2)).max() < EXACT


@pytest.mark.parametrize("scale", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_every_place_among_drawn_siblings(scale: float) -> None:
    """Before, between and behind them, and at equal values."""
    for token in range(3):
        made = Text([[token, token]], [scale]).on(adaptive(depth=2, learnt=False))
        assert bias(made, "traversal", nodes=5, pairs=models(3, 2)).max() < EXACT


def all_drawn(merged: Proposal, grown: Proposal) -> Proposal:
    return merged._replace(chosen=None)


def on_the_text(merged: Proposal, grown: Proposal) -> Proposal:
    """Every node with the text's token, also one that was drawn before the text would stand there."""
    assert merged.chosen is not None
    return merged._replace(chosen=merged.chosen | (merged.tree.tokens == 0))


def behind(merged: Proposal, grown: Proposal) -> Proposal:
    """Continuations in place of what was drawn: a tree without the draws that the text has pushed out."""
    assert merged.chosen is not None
    tree = merged.tree
    hidden = tree.valid & ~merged.chosen & (tree.depth == 1) & (tree.tokens == 1)
    return merged._replace(tree=tree.cut(torch.where(hidden.any(1), hidden.int().argmax(1), tree.valid.sum(1))))


@pytest.mark.parametrize("change", [all_drawn, on_the_text, behind])
def test_what_is_not_lossless(change: Change) -> None:
    """A chosen node taken for a drawn one, a drawn one for a chosen one, and a draw that decides about itself."""
    pairs = strangers(3, depth=2, count=8)
    tokens, weight = [[0, 0]], [0.3 if change is on_the_text else 0.8]
    assert bias(Text(tokens, weight).on(adaptive(depth=2)), "traversal", nodes=4, pairs=pairs).max() < EXACT
    wrong = Text(tokens, weight, change).on(adaptive(depth=2))
    assert bias(wrong, "traversal", nodes=4, pairs=pairs).max() > BIASED
