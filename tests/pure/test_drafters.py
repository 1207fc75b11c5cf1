"""Drafts that are no model with a forward a level: proposers grow the same trees of them as of a model that says the
same, and rules keep the target's law.

The model that says the same is a `ToyLM`: one row for every history, -inf throughout where the draft has ended.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.oracles.growth import as_the_engine, grow
from vllm_adaptive_tree.drafters import ByDepth, ByPair, ByParent, ByPath, Continuations, Lookup, Rows
from vllm_adaptive_tree.proposers import StaticTree
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.testing import drafts, outcomes
from vllm_adaptive_tree.testing.drafts import keyed
from vllm_adaptive_tree.testing.models import ToyLM
from vllm_adaptive_tree.testing.outcomes import ForkingRandom, every_outcome
from vllm_adaptive_tree.testing.well_formed import paths_of
from vllm_adaptive_tree.trees import Shape

from .test_dead_rows import PROPOSERS
from .test_pairs import CHOSEN, DYSPEC, EXACT, LEGAL, bias, static, stopping

VOCABULARY, LEVELS, REQUESTS, NODES = 3, 2, 4, 7


class Kind(NamedTuple):
    """A draft of R requests, as `growing.grow` takes one."""

    drafter: Any
    said: Any  # what `begin` is given
    law: Callable[[int, tuple[int, ...]], Tensor]  # logits [V] of a request behind a path, by hand

    def catch_up(self, *_: Any) -> tuple[Rows, Any]:
        rows, state = self.drafter.begin(*self.said)
        return rows, state

    def grow(self, *arguments: Any) -> tuple[Rows, Any]:
        rows, state = self.drafter.grow(*arguments)
        return rows, state

    def models(self, depth: int) -> list[ToyLM]:
        paths = [path for length in range(depth + 1) for path in product(range(VOCABULARY), repeat=length)]
        return [ToyLM(torch.stack([self.law(r, path) for path in paths])) for r in range(REQUESTS)]


NOTHING = torch.full((VOCABULARY,), -torch.inf, dtype=torch.float64)


def random(*shape: int, seed: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_depth() -> Kind:
    logits = random(REQUESTS, LEVELS, VOCABULARY, seed=0)
    return Kind(ByDepth(), (logits,), lambda r, path: logits[r, len(path)] if len(path) < LEVELS else NOTHING)


def by_parent() -> Kind:
    logits, bias = random(REQUESTS, LEVELS, VOCABULARY, seed=1), random(VOCABULARY, VOCABULARY, seed=2)

    def law(r: int, path: tuple[int, ...]) -> Tensor:
        if len(path) >= LEVELS:
            return NOTHING
        return logits[r, len(path)] + (bias[path[-1]] if path else 0)

    return Kind(ByParent(lambda tokens: bias[tokens]), (logits,), law)


CANDIDATES = torch.tensor([[[2, 0], [1, 2]], [[0, 1], [0, 1]], [[1, 2], [2, 0]], [[0, 2], [1, 0]]])  # [R, K, C]


def cut(logits: Tensor, r: int, path: tuple[int, ...]) -> Tensor:
    """Logits [V] in which only the candidates of a depth may be drafted."""
    return NOTHING.scatter(0, CANDIDATES[r, len(path)], logits[CANDIDATES[r, len(path)]])


def by_depth_of_candidates() -> Kind:
    logits = random(REQUESTS, LEVELS, VOCABULARY, seed=3)

    def law(r: int, path: tuple[int, ...]) -> Tensor:
        return cut(logits[r, len(path)], r, path) if len(path) < LEVELS else NOTHING

    return Kind(ByDepth(VOCABULARY), (logits.gather(2, CANDIDATES), CANDIDATES), law)


def by_parent_of_candidates() -> Kind:
    """Depth 1 too depends on the token before it."""
    logits, bias = random(REQUESTS, LEVELS, VOCABULARY, seed=4), random(VOCABULARY, VOCABULARY, seed=5)
    roots = torch.tensor([1, 0, 2, 0])

    def law(r: int, path: tuple[int, ...]) -> Tensor:
        if len(path) >= LEVELS:
            return NOTHING
        return cut(logits[r, len(path)] + bias[path[-1] if path else roots[r]], r, path)

    given = (logits.gather(2, CANDIDATES), CANDIDATES, roots)
    return Kind(ByParent(lambda tokens: bias[tokens], VOCABULARY), given, law)


def by_pair() -> Kind:
    """Behind what is no candidate, nothing."""
    scores = random(REQUESTS, LEVELS, 2, 2, seed=6)

    def law(r: int, path: tuple[int, ...]) -> Tensor:
        if len(path) >= LEVELS:
            return NOTHING
        before = CANDIDATES[r, len(path) - 1].tolist()
        if path and path[-1] not in before:
            return NOTHING
        row = scores[r, len(path), before.index(path[-1]) if path else 0]
        return NOTHING.scatter(0, CANDIDATES[r, len(path)], row)

    return Kind(ByPair(VOCABULARY), (scores, CANDIDATES), law)


def by_path(*, candidates: bool = False, levels: int = LEVELS) -> Kind:
    """vLLM's `XPressRefinerHead.refine_bias` for one path, of a block whose tokens are settled."""
    size = 4
    logits, states = random(REQUESTS, levels, VOCABULARY, seed=7), random(REQUESTS, 1 + levels, size, seed=8)
    mixer = random(1 + levels, 1 + levels, size, seed=9)
    embedding, out = random(VOCABULARY, size, seed=10), random(size, VOCABULARY, seed=11)
    roots = torch.tensor([2, 0, 1, 1])

    def put(tokens: Tensor, places: Tensor) -> Tensor:
        return (embedding[tokens] + places).tanh()

    def law(r: int, path: tuple[int, ...]) -> Tensor:
        if len(path) >= levels:
            return NOTHING
        before = torch.tensor([roots[r], roots[r], *path])  # the token before each place
        entered, below = put(before, states[r, : len(before)]), len(path) + 1
        mixture = sum(mixer[below, place] * entered[place] for place in range(below + 1))
        row = logits[r, len(path)] + mixture.sin() @ out
        return cut(row, r, path) if candidates else row

    given = (logits.gather(2, CANDIDATES), CANDIDATES, roots, states) if candidates else (logits, None, roots, states)
    return Kind(ByPath(put, mixer, lambda mixtures: mixtures.sin() @ out, VOCABULARY), given, law)


class Given(Lookup):
    """Look-up that finds the continuations that it is given."""

    @classmethod
    def build(cls, options: Any, *, vocabulary: int) -> "Given":
        return cls(vocabulary)

    def continuations(self, texts: Any) -> Continuations:
        return Continuations(*texts)


def lookup() -> Kind:
    """Of the last request nothing was found."""
    end = [-1, -1]
    tokens = torch.tensor(
        [
            [[0, 1, 2], [0, 1, 1], [0, 2, *end[:1]], [2, *end]],
            [[1, 1, 1], [1, 1, 1], [1, *end], [0, 0, 0]],
            [[2, 0, 1], [0, *end], [-1, *end], [-1, *end]],
            [[-1, *end]] * 4,
        ]
    )
    weight = torch.tensor([[4.0, 2, 2, 1], [1, 3, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)

    def law(r: int, path: tuple[int, ...]) -> Tensor:
        counts = torch.zeros(VOCABULARY, dtype=torch.float64)
        for own, worth in zip(tokens[r].tolist(), weight[r].tolist(), strict=True):
            if tuple(own[: len(path)]) == path and len(path) < len(own) and own[len(path)] >= 0:
                counts[own[len(path)]] += worth
        return counts.log()

    return Kind(Given(VOCABULARY), ((tokens, weight),), law)


LATTICES = {
    "by depth": by_depth,
    "by parent": by_parent,
    "candidates by depth": by_depth_of_candidates,
    "candidates by parent": by_parent_of_candidates,
    "pairs": by_pair,
    "paths": by_path,
    "candidates of paths": partial(by_path, candidates=True),
}
DRAFTS = {**LATTICES, "look-up": lookup}
EVERY = pytest.mark.parametrize("draft", DRAFTS)


@EVERY
@pytest.mark.parametrize("name", PROPOSERS)
def test_a_proposer_does_not_know_which_it_has(draft, name):
    kind = DRAFTS[draft]()
    lost = list[Tensor]()
    found = [
        grow(PROPOSERS[name](), kind.models(3), nodes=NODES, drafter=drafter, agree=as_the_engine, lost=lost.append)
        for drafter in (kind, None)
    ]
    for one, other in zip((*found[0].tree, *found[0][1:3]), (*found[1].tree, *found[1][1:3]), strict=True):
        assert one.equal(other)
    assert found[0].tree.valid.any()


def test_a_path_is_mixed_down_to_the_last_level():
    kind, levels = by_path(levels=4), 4
    paths: list[list[tuple[int, ...]]] = [[()]]
    rows, state = kind.drafter.begin(*kind.said)
    for _ in range(levels):
        for r, column in product(range(REQUESTS), range(len(paths[-1]))):
            torch.testing.assert_close(rows.logits[r, column], kind.law(r, paths[-1][column]))
        start = sum(map(len, paths[:-1]))
        paths.append([(*path, token) for path in paths[-1] for token in (2, 0)])
        parent = start + torch.arange(len(paths[-1])) // 2
        tokens = torch.tensor([path[-1] for path in paths[-1]])
        rows, state = kind.grow(tokens.expand(REQUESTS, -1), parent.expand(REQUESTS, -1), state)
    assert rows.dead is not None
    assert rows.dead.all()


@EVERY
def test_what_has_ended_is_no_fault(draft):
    kind, lost = DRAFTS[draft](), list[Tensor]()
    proposal = grow(
        OptTree(max_depth=6, threshold=0.0),
        kind.models(0),
        nodes=40,
        drafter=kind,
        agree=as_the_engine,
        lost=lost.append,
    )
    assert len(lost) > LEVELS, "it was asked below its last level"
    assert not torch.cat(lost, 1).any()
    assert int(proposal.tree.depth.max()) == (3 if draft == "look-up" else LEVELS)


def test_what_is_no_number_is_one():
    logits = random(REQUESTS, LEVELS, VOCABULARY, seed=0)
    logits[1, 1, 0] = torch.nan
    kind, lost = Kind(ByDepth(), (logits,), by_depth().law), list[Tensor]()
    tree = grow(
        OptTree(max_depth=6, threshold=0.0),
        kind.models(0),
        nodes=40,
        drafter=kind,
        agree=as_the_engine,
        lost=lost.append,
    ).tree
    assert torch.cat(lost, 1).sum(1).tolist() == [0, VOCABULARY, 0, 0], "every node of its first level"
    assert tree.depth.amax(1).tolist() == [LEVELS, 1, LEVELS, LEVELS]


@pytest.mark.parametrize("nodes", [1, 3, 5])
@pytest.mark.parametrize("draft", LATTICES)
def test_opt_tree_is_exact(draft, nodes):
    """No tree of as many nodes has a larger expected acceptance, of all that there are (arXiv 2604.12989)."""
    kind = LATTICES[draft]()
    models = kind.models(LEVELS)
    found = paths_of(grow(OptTree(max_depth=LEVELS, threshold=0.0), models, nodes=nodes, drafter=kind))
    all_paths = [path for length in (1, 2) for path in product(range(VOCABULARY), repeat=length)]
    for model, paths in zip(models, found, strict=True):
        every = [path for path in all_paths if model.probability(path) > 0]  # NaN behind what is no candidate
        assert expected(model, paths) == pytest.approx(
            max(expected(model, tree) for tree in combinations(every, nodes) if is_tree(tree)), abs=1e-12
        )


def expected(model: ToyLM, paths: Sequence[tuple[int, ...]]) -> float:
    """Tokens accepted of a tree if the target is like the draft."""
    return sum(model.probability(path) for path in paths)


def is_tree(paths: Sequence[tuple[int, ...]]) -> bool:
    return all(len(path) == 1 or path[:-1] in paths for path in paths)


def test_a_look_up_s_law_is_the_share_of_its_weight():
    weights = grow(OptTree(max_depth=3, threshold=0.0), lookup().models(0), nodes=6, drafter=lookup()).tree.log_weight
    torch.testing.assert_close(
        weights[0].exp(), torch.tensor([8 / 9, 2 / 3, 4 / 9, 2 / 9, 2 / 9, 1 / 9], dtype=torch.float64)
    )


# -- the law


def targets(drafts: list[ToyLM], depth: int) -> list[ToyLM]:
    return [ToyLM.random(VOCABULARY, depth, seed=9 - r, scale=1.5) for r in range(len(drafts))]


def pairs(draft: str, depth: int) -> tuple[list[ToyLM], list[ToyLM]]:
    drafts = DRAFTS[draft]().models(depth)
    return drafts, targets(drafts, depth)


@EVERY
@pytest.mark.parametrize(("kind", "rule"), LEGAL)
def test_static_trees_keep_the_law(draft, kind, rule):
    assert bias(static(kind, Shape.named("binary", 4)), rule, nodes=4, pairs=pairs(draft, 3)).max() < EXACT


@EVERY
@pytest.mark.parametrize("rule", ["target_only", "rrsw", "traversal"])
@pytest.mark.parametrize("name", DYSPEC)
def test_dyspec_keeps_the_law(draft, name, rule):
    assert bias(DYSPEC[name](), rule, nodes=4, pairs=pairs(draft, 3)).max() < EXACT


@EVERY
@pytest.mark.parametrize("rule", ["target_only", "traversal"])
@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_children_keep_the_law(draft, name, rule):
    assert bias(CHOSEN[name](), rule, nodes=5, pairs=pairs(draft, 3)).max() < EXACT


@pytest.mark.parametrize("draft", LATTICES)
@pytest.mark.parametrize(("kind", "rule"), LEGAL)
def test_mcsd_keeps_the_law(draft, kind, rule):
    assert bias(stopping(kind), rule, nodes=4, pairs=pairs(draft, 3)).max() < EXACT


@pytest.mark.parametrize("draft", ["candidates by depth", "pairs"])
def test_what_is_no_candidate_has_no_probability(draft):
    kind = LATTICES[draft]()
    rows, state = kind.catch_up()
    tokens = CANDIDATES[:, 0]
    below, _ = kind.grow(tokens, torch.zeros_like(tokens), state)
    for logits, candidates in ((rows.logits, CANDIDATES[:, :1]), (below.logits, CANDIDATES[:, 1:].expand(-1, 2, -1))):
        probs = logits.softmax(2)
        assert probs.scatter(2, candidates, 0).eq(0).all()
        torch.testing.assert_close(probs.gather(2, candidates).sum(2), torch.ones_like(probs[..., 0]))


def test_behind_what_is_no_candidate_there_is_nothing():
    """The target itself may have put it there; that is no fault."""
    kind = by_pair()
    rows, state = kind.catch_up()
    other = torch.tensor([1, 2, 0, 1])[:, None]
    assert (CANDIDATES[:, 0] != other).all()
    rows, _ = kind.grow(torch.cat([CANDIDATES[:, 0], other], 1), torch.zeros(REQUESTS, 3, dtype=torch.int64), state)
    assert rows.dead.tolist() == [[False, False, True]] * REQUESTS


class Shared(ForkingRandom):
    """One draw for all nodes of a level."""

    def sample_without_replacement(self, law: Tensor, k: int) -> Tensor:
        return super().sample_without_replacement(law[:, :1], k).expand(*law.shape[:2], k)


def test_a_shared_draw_is_caught(monkeypatch):
    def shape() -> StaticTree:
        return static("without_replacement", Shape.k_config([2, 2]))

    independent = bias(shape(), "traversal", nodes=6, pairs=pairs("by depth", 2)).max()
    assert independent < EXACT

    def with_shared_draws(run: Any, worlds: int) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(outcomes, "ForkingRandom", Shared)
            yield from every_outcome(run, worlds)

    monkeypatch.setattr(drafts, "every_outcome", with_shared_draws)
    assert bias(shape(), "traversal", nodes=6, pairs=pairs("by depth", 2)).max() > 0.01


def test_every_node_has_a_random_stream_of_its_own():
    """Equal laws, other children: that is what `draft_tree` asks of its random source."""
    logits = torch.zeros(1, 2, 64, dtype=torch.float64)
    kind = Kind(ByDepth(), (logits,), lambda r, path: logits[r, 0])
    proposer = StaticTree(Shape.k_config([4, 4]), kind="without_replacement")
    paths = paths_of(grow(proposer, [ToyLM(logits[0])], nodes=20, drafter=kind, rng=keyed(1)))[0]
    below = [tuple(path[1] for path in paths if len(path) == 2 and path[0] == first[0]) for first in paths[:4]]
    assert len(set(below)) == 4
