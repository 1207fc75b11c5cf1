"""Adaptive trees compiled for a CPU against the same in tensors."""

import pytest
import torch

from tests.oracles.growth import as_the_engine, grow
from vllm_adaptive_tree.proposers.acceptance_table import SHAPE
from vllm_adaptive_tree.proposers.adaptive_tree import AdaptiveTree
from vllm_adaptive_tree.proposers.adaptive_tree_cpu import AdaptiveTreeCPU
from vllm_adaptive_tree.testing.drafts import keyed
from vllm_adaptive_tree.testing.models import ToyDrafter, ToyLM

from .test_opt_tree_cpu import Wide

VOCABULARIES = [(8, 2), (33, 2), (64, 2), (100, 2), (700, 1)]  # and depths that are tabulated


def assert_same(ours, theirs):
    """Values differ by rounding, the more the less the earlier siblings leave; no token does."""
    assert ours.chosen is theirs.chosen is None, "there is no look-up"
    for one, other in zip((*ours.tree, *ours[1:-1]), (*theirs.tree, *theirs[1:-1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-3 if one.is_floating_point() else 0)


def both(models, *, seed: int | None = None, floor: float = -torch.inf, **options):
    """The proposals on any device and on the host, by a table learnt from nothing, or by a random one."""
    limits = {"max_depth": options.pop("max_depth"), "max_children": options.pop("max_children", 16)}
    generic = AdaptiveTree(**limits, drawn_from=0.4)
    if seed is not None:
        random = torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed)).sort(-1).values
        generic.acceptance.chance.copy_(random.clamp(0.001, 0.995))
    compiled = generic.for_cpu()
    assert type(compiled) is AdaptiveTreeCPU
    assert compiled.acceptance is generic.acceptance
    for one in (generic, compiled):
        one.floor = floor
    options.setdefault("rng", keyed(len(models)))
    return [grow(one, models, drafter=Wide(models), agree=as_the_engine, **options) for one in (generic, compiled)]


@pytest.mark.parametrize("chosen", [True, False, [True, False] * 5])
@pytest.mark.parametrize("nodes", [1, 4, 24])
@pytest.mark.parametrize("size", VOCABULARIES)
def test_the_same_trees(size, nodes, chosen):
    models = [ToyLM.random(*size, seed=seed, scale=0.5 + seed % 4 / 2, dtype=torch.float32) for seed in range(10)]
    temperature = [0.4 + 0.1 * seed for seed in range(10)]
    for max_depth, table in ((1, None), (2, 0), (5, 1), (6, None)):
        how = {"temperature": temperature, "chosen": chosen, "greedy": [True, False, False, False, True] * 2}
        how["max_children"] = min(16, size[0] - 2)
        generic, compiled = both(models, nodes=nodes, max_depth=max_depth, seed=table, **how)
        assert_same(compiled, generic)
        assert (compiled.tree.tokens >= 0).any()


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("floor", [-0.5, -1.5])
def test_the_same_trees_above_a_floor(floor, chosen):
    models = [ToyLM.random(33, 2, seed=seed, scale=3.0, dtype=torch.float32) for seed in range(10)]
    generic, compiled = both(models, nodes=16, max_depth=5, max_children=5, seed=3, floor=floor, chosen=chosen)
    assert_same(compiled, generic)


@pytest.mark.parametrize("chosen", [True, False])
def test_banned_tokens_are_no_candidates(chosen):
    models = [ToyLM.random(40, 2, seed=seed, dtype=torch.float32) for seed in range(4)]
    for model in models:
        model.logits[:, :30] = model.logits[:, 33:] = -torch.inf
    generic, compiled = both(models, nodes=8, max_depth=3, chosen=chosen)
    assert_same(compiled, generic)
    tokens = compiled.tree.tokens[compiled.tree.valid]
    assert (tokens.min(), tokens.max()) == (30, 32)


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_same_trees_where_rows_are_dead(value, chosen):
    models = [ToyLM.random(33, 2, seed=seed, scale=3.0, dtype=torch.float32) for seed in range(10)]
    for number, model in enumerate(models):
        best = int(model.logits[0].argmax())
        model.logits[[0, 1 + best, 1 + best, 20, -1][number % 5]] = value
    generic, compiled = both(models, nodes=16, max_depth=4, chosen=chosen)
    assert_same(compiled, generic)
    assert (compiled.tree.tokens < 0).all(1).tolist() == [True, False, False, False, False] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("chosen", [True, False])
def test_the_same_trees_of_other_types(chosen, dtype):
    models = [ToyLM.random(100, 1, seed=seed, scale=3.0, dtype=torch.float32) for seed in range(10)]
    models = [ToyLM(model.logits.bfloat16().to(dtype)) for model in models]
    for proposal in both(models, nodes=16, max_depth=3, chosen=chosen)[1:]:
        same = both([ToyLM(model.logits.float()) for model in models], nodes=16, max_depth=3, chosen=chosen)[1]
        assert_same(proposal, same)


def test_a_value_does_not_see_its_own_draw_not_even_by_rounding():
    """Slots after the same earlier siblings have one value, bit for bit, whatever they draw themselves."""
    requests = 300
    model = ToyLM.random(6, 0, seed=1, scale=2.0, dtype=torch.float32)
    made = AdaptiveTree(max_depth=1, max_children=4, drawn_from=0.0).for_cpu()
    made.acceptance.chance.copy_(torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)).sort(-1).values)
    drafter = ToyDrafter([model], torch.zeros(requests, dtype=torch.int64))
    tree = grow(made, [model], drafter=drafter, nodes=4, rng=keyed(requests), chosen=False).tree
    tokens, value = tree.tokens.tolist(), tree.log_weight.tolist()
    for slot in range(4):
        values: dict[tuple[int, ...], set[float]] = {}
        draws: dict[tuple[int, ...], set[int]] = {}
        for drawn, worth in zip(tokens, value, strict=True):
            values.setdefault(tuple(drawn[:slot]), set()).add(worth[slot])
            draws.setdefault(tuple(drawn[:slot]), set()).add(drawn[slot])
        assert max(map(len, draws.values())) > 1
        assert max(map(len, values.values())) == 1
