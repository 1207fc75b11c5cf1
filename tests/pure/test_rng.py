"""CounterRNG samples the distributions it is given, and streams with different keys are independent."""

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import RULES, Kind, legal_rules
from vllm_adaptive_tree.proposers import StaticTree
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.testing.drafts import Drafts, node_probs, propose
from vllm_adaptive_tree.testing.models import ToyDrafter, ToyLM, histories
from vllm_adaptive_tree.testing.steps import verify
from vllm_adaptive_tree.trees import Shape

MANY = 1_000_000
DRAWS = 50_000
BINS = 16
P = 1e-4  # what a check may find by chance
LAW = torch.tensor([0.3, 0.02, 0.15, 0.0, 0.25, 0.08, 0.2, 0.0], dtype=torch.float64)


def rng(requests: int = DRAWS, *, position: int = 0, purpose: int = 0, first: int = 0) -> CounterRNG:
    """One request per seed, the seeds in a row: those that people give."""
    seeds = torch.arange(first, first + requests)
    return CounterRNG(seeds, torch.full_like(seeds, position), purpose)


def chi_square(found: Tensor, law: Tensor) -> float:
    """The probability of numbers no closer to the law than those found; what it excludes must not occur."""
    counts = torch.bincount(found.flatten(), minlength=len(law)).double()
    possible = law > 0
    assert not counts[~possible].any()
    expected = (law / law.sum() * counts.sum())[possible]
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1.0, dtype=torch.float64)
    return torch.special.gammaincc(freedom / 2, statistic / 2).item() if freedom else 1.0


def uniforms(source: CounterRNG) -> Tensor:
    """The bin of each place's next number."""
    return source.sample(torch.ones(*source.key.shape, BINS))


def assert_independent(one: Tensor, other: Tensor) -> None:
    """Both uniform, and jointly so."""
    assert chi_square(one * BINS + other, torch.ones(BINS**2)) > P


def test_the_check_sees_a_wrong_law_and_dependence():
    skewed = LAW.index_fill(0, torch.tensor(0), 0.32)
    assert chi_square(rng().sample(skewed.expand(DRAWS, -1)), LAW) < P
    same, shifted = uniforms(rng()), uniforms(rng(first=1))
    with pytest.raises(AssertionError):
        assert_independent(same, same)
    with pytest.raises(AssertionError):
        assert_independent(same, torch.where(torch.arange(DRAWS) % 20 > 0, shifted, same))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sample(dtype):
    """A law need not sum to 1; what has no mass never comes."""
    assert chi_square(rng().sample(3 * LAW.to(dtype).expand(DRAWS, -1)), LAW) > P


def test_accept():
    for probability in (0.0, 1e-3, 0.4, 1.0):
        taken = rng().accept(torch.full((DRAWS,), probability)).long()
        law = torch.tensor([1 - probability, probability], dtype=torch.float64)
        assert chi_square(taken, law) > P


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sample_without_replacement(dtype):
    """Ordered triples; tokens without mass never."""
    drawn = rng().sample_without_replacement(LAW.to(dtype).expand(DRAWS, -1), 3)
    size = len(LAW)
    law = torch.zeros(size**3, dtype=torch.float64)
    for a, b, c in permutations(range(size), 3):
        left = 1 - LAW[a], 1 - LAW[a] - LAW[b]
        law[(a * size + b) * size + c] = LAW[a] * LAW[b] / left[0] * LAW[c] / left[1]
    assert chi_square((drawn[:, 0] * size + drawn[:, 1]) * size + drawn[:, 2], law) > P


@pytest.mark.parametrize("vocabulary", [8, 700])
@pytest.mark.parametrize("scale", [1.0, 10.0, 1e-11])
def test_draws_differ_until_nothing_is_left(vocabulary, scale):
    """Also where all but one token are close to nothing."""
    requests, k = 2_000, 8
    law = torch.rand(requests, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    law[:, vocabulary // 2 :] = 0
    law = law * scale if scale < 1 else (scale * law).softmax(1) * (law > 0)
    law[:, 1] = 1
    drawn = rng(requests).sample_without_replacement(law, k)
    there = drawn >= 0
    assert (there[:, :-1] | ~there[:, 1:]).all(), "nothing comes behind the end"
    assert law.gather(1, drawn.clamp(min=0))[there].min() > 0
    in_order = drawn.sort(1).values
    assert not ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any()
    if vocabulary == 8 and scale >= 1:
        assert (there.sum(1) == 4).all()


def test_an_exhausted_distribution_yields_no_token():
    law = torch.eye(4)[2].expand(100, 4)
    assert rng(100).sample_without_replacement(law, 3).tolist() == [[2, -1, -1]] * 100


PLACES: dict[str, Callable[[], tuple[CounterRNG, CounterRNG]]] = {
    "nodes": lambda: (rng().fold_in(torch.full((DRAWS,), 3)), rng().fold_in(torch.full((DRAWS,), 4))),
    "a node and no node": lambda: (rng().fold_in(torch.full((DRAWS,), 1)), rng()),
    "levels": lambda: (rng().fold_in(torch.full((DRAWS,), 1)), rng().fold_in(torch.full((DRAWS,), 1 << 32))),
    "places in places": lambda: (
        rng().fold_in(torch.full((DRAWS,), 1)).fold_in(torch.full((DRAWS,), 2)),
        rng().fold_in(torch.full((DRAWS,), 2)).fold_in(torch.full((DRAWS,), 1)),
    ),
    "purposes": lambda: (rng(purpose=0), rng(purpose=1)),
    "positions": lambda: (rng(position=40), rng(position=41)),
    "seeds": lambda: (rng(first=0), rng(first=1)),
    "far seeds": lambda: (rng(first=0), rng(first=1 << 61)),
    "negative seeds": lambda: (rng(first=0), rng(first=-DRAWS)),
    "seed and position": lambda: (rng(first=0, position=8), rng(first=8, position=0)),
}


@pytest.mark.parametrize("name", PLACES)
def test_different_keys_are_independent(name):
    one, other = PLACES[name]()
    assert_independent(uniforms(one), uniforms(other))


def test_calls_of_one_key_are_independent():
    source = rng()
    first, coin, second = uniforms(source), source.accept(torch.full((DRAWS,), 0.5)), uniforms(source)
    assert_independent(first, second)
    for drawn in (first, second):
        assert chi_square(2 * drawn + coin, torch.ones(2 * BINS)) > P


def test_places_of_one_request_are_uniform_and_independent():
    """As `test_different_keys_are_independent`, but along the places of few requests."""
    places = torch.arange(DRAWS // 4).expand(4, -1)
    found = uniforms(rng(4).fold_in(places))
    assert_independent(found[:, :-1].flatten(), found[:, 1:].flatten())
    assert_independent(found[:2].flatten(), found[2:].flatten())


def test_no_two_keys_are_equal():
    """Small seeds and positions, the ones that occur, and swapped: seed 8 at 2 is not seed 16 at 1."""
    seed, position = (axis.flatten() for axis in torch.meshgrid(*[torch.arange(300)] * 2, indexing="ij"))
    keys = [CounterRNG(seed, position, purpose).key for purpose in range(3)]
    assert len(torch.cat(keys).unique()) == 3 * 300**2


def test_answers_do_not_depend_on_the_batch():
    law = torch.rand(5, 3, 8, generator=torch.Generator().manual_seed(0))
    seed, position, place = torch.arange(5) * 7, torch.arange(5), torch.arange(15).view(5, 3)

    def answers(rows: list[int], columns: list[int]) -> list[Tensor]:
        source = CounterRNG(seed[rows], position[rows], 1).fold_in(place[rows][:, columns])
        own = law[rows][:, columns]
        return [source.sample(own), source.accept(own[..., 0]), source.sample_without_replacement(own, 3)]

    together = answers([0, 1, 2, 3, 4], [0, 1, 2])
    for rows, columns in (([3], [1]), ([4, 0], [0, 1]), ([2, 3, 1], [2])):
        for found, expected in zip(answers(rows, columns), together, strict=True):
            assert torch.equal(found, expected[rows][:, columns])


# Through the pure rooms: the first two tokens of a step, continued by the target, follow the target.

KINDS: list[Kind] = ["one_hot", "without_replacement", "iid", "hub_pair", "top_k_plus_one"]
LEGAL = [(kind, rule) for kind in KINDS for rule in legal_rules((kind,), 2)]
DRAFT, TARGET = (ToyLM.random(8, 2, seed=seed, scale=1.0, dtype=torch.float32) for seed in (1, 2))


def first_two(kind: Kind, rule: str, requests: int, first: int = 0) -> Tensor:
    """The tokens, as one number, of a step of each of these seeds."""
    same = torch.zeros(requests, dtype=torch.int64)
    levels: list[Tensor] = []
    proposer = StaticTree(Shape.of([[0], [1], [0, 0], [0, 1]]), kind=kind)
    proposal = propose(proposer, ToyDrafter([DRAFT], same), nodes=4, rng=rng(requests, first=first), keep=levels.append)
    nothing = torch.zeros_like(proposal.tree.valid)
    drafts = Drafts(torch.ones(requests), same, proposal.tree, *node_probs(proposal, levels, 1.0), nothing, 2)
    p = TARGET.probs[histories(proposal.tree, 8)]  # [R, 1 + N, 8]
    tokens = verify(drafts, p, RULES[rule], kind, rng(requests, purpose=1, first=first)).tokens
    one, two = tokens[:, 0], tokens[:, 1]
    by_target = rng(requests, purpose=2, first=first).sample(TARGET.probs[1 + one])
    return one * 8 + torch.where(two >= 0, two, by_target)


@pytest.mark.parametrize(("kind", "rule"), LEGAL)
def test_legal_pairs_follow_the_target(kind, rule):
    assert chi_square(first_two(kind, rule, 20_000), TARGET.continuations(2)) > P


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule"), LEGAL)
def test_legal_pairs_follow_the_target_a_million_times(kind, rule):
    tokens = [first_two(kind, rule, MANY // 20, first) for first in range(0, MANY, MANY // 20)]
    assert chi_square(torch.cat(tokens), TARGET.continuations(2)) > P


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("one_hot", "rrsw"), ("iid", "spechub"), ("without_replacement", "k_seq"), ("top_k_plus_one", "rrsw")],
)
def test_other_pairs_do_not(kind, rule):
    assert chi_square(first_two(kind, rule, 20_000), TARGET.continuations(2)) < P
