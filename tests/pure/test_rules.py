"""Inputs that a rule must not depend on."""

import pytest
import torch

from vllm_adaptive_tree.acceptance import RULES, Children
from vllm_adaptive_tree.rng import CounterRNG

TOP_DOWN = [name for name, rule in RULES.items() if rule.draw is not None]


@pytest.mark.parametrize("name", TOP_DOWN)
def test_columns_without_a_child_change_nothing(name):
    """A request's tokens must not depend on how many children others in its batch have."""
    rows, vocabulary = 500, 6
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(rows, vocabulary, generator=generator).softmax(-1) for _ in range(2))
    rng = CounterRNG(torch.arange(rows), torch.zeros(rows, dtype=torch.int64), purpose=1)
    tokens = torch.stack([torch.randperm(vocabulary, generator=generator)[:2] for _ in range(rows)])
    drawn = torch.full((rows,), 2)
    padded = torch.nn.functional.pad(tokens, (0, 3), value=-1)
    draw, places = RULES[name].draw, torch.arange(rows)
    narrow = draw(p, q, Children(tokens, drawn, 2), rng.fold_in(places))
    wide = draw(p, q, Children(padded, drawn, 2), rng.fold_in(places))
    assert torch.equal(narrow, wide)
    assert len(narrow.unique()) == vocabulary
