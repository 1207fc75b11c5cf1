"""Trees whose first layer the target drew: the longest path wins, which is lossless for one initial token only."""

import pytest
import torch
from torch import Tensor

from tests.oracles.growth import grow, models_of
from tests.oracles.trees import on_device
from vllm_adaptive_tree.acceptance import RULES, Accepted, Children, longest_continuation, walk
from vllm_adaptive_tree.proposers import Request, draft_tree
from vllm_adaptive_tree.proposers.mcsd import Mcsd
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.step.target_init import candidates, held_back
from vllm_adaptive_tree.testing.models import ToyDrafter, ToyLM, histories
from vllm_adaptive_tree.testing.outcomes import ForkingRandom, every_outcome
from vllm_adaptive_tree.testing.well_formed import paths_of
from vllm_adaptive_tree.trees import Shape, TokenTree

FORK = TokenTree((7, 8, 9, 1, 2, 3), (-1, -1, -1, 0, 1, 4))  # 7 1 | 8 2 3 | 9


def kept(tree: TokenTree, initial: int, says: dict[int, int]) -> list[int]:
    """The tokens kept where the target says a token behind each node (-1: the root)."""

    def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tensor([says.get(int(node[0]), 0)]), torch.ones_like(active)

    tokens = longest_continuation(on_device([tree]), torch.tensor([initial]), draw, levels=3, most=3).tokens[0].tolist()
    return [token for token in tokens if token >= 0]


@pytest.mark.parametrize(
    ("initial", "says", "expected"),
    [
        (3, {0: 4, 1: 2, 4: 5, -1: 9}, [8, 2, 5]),  # the longest, whatever the root says
        (3, {0: 1, 3: 4, 1: 2, 4: 3, 5: 6}, [8, 2, 3, 6]),
        (3, {0: 1, 3: 4, 1: 5}, [7, 1, 4]),
        (3, {0: 5, 1: 5, 2: 6}, [7, 5]),  # the first on ties
        (2, {0: 5, 1: 2, 2: 6}, [8, 2, 0]),
        (1, {0: 5, 1: 2, 4: 3}, [7, 5]),  # one initial token: no choice
        (0, {-1: 9, 2: 4, 1: 2}, [9, 4]),  # none: from the root
        (0, {-1: 4, 1: 2}, [4]),
    ],
)
def test_the_longest_path(initial, says, expected):
    assert kept(FORK, initial, says) == expected


ACCEPTED = Accepted(
    torch.tensor([[4, 5, 6], [3, -1, -1], [2, 7, -1]]), torch.tensor([[0, 2, -1], [-1] * 3, [1, -1, -1]])
)


class Told:
    """Target and requests: p after node i is [R, 8], and prefers the tokens after i."""

    greedy = torch.tensor([True, True, False])

    def probs(self, node: Tensor, active: Tensor) -> Tensor:
        return ((torch.arange(8) - node[:, None] - 1) % 8 * -1.0).softmax(-1)

    def rng(self, purpose: int) -> CounterRNG:
        return CounterRNG(torch.arange(3), torch.full((3,), 9), purpose)


def test_the_last_of_several_tokens_is_held_back():
    assert held_back(ACCEPTED).tokens.tolist() == [[4, 5, -1], [3, -1, -1], [2, -1, -1]]
    assert held_back(ACCEPTED).nodes is ACCEPTED.nodes


def test_it_heads_the_next_tree_beside_others_of_the_target():
    first = candidates(Told(), ACCEPTED, 3, Told()).tolist()
    assert first[0] == [6, 3, 4]  # the best two after node 2, but for the token itself
    assert first[1] == [-1] * 3
    assert first[2][0] == 7
    assert len({*first[2]}) == 3
    assert all(0 <= token < 8 for token in first[2])


def test_without_initial_tokens_it_is_the_walk():
    tree = on_device([FORK, FORK, FORK])
    script = torch.tensor([[8, 2, 3, 1], [9, 9, 9, 9], [5, 5, 5, 5]])

    def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        depth = torch.where(node < 0, 0, tree.depth.gather(1, node.clamp(min=0)[:, None])[:, 0])
        return script.gather(1, depth[:, None])[:, 0], torch.ones_like(active)

    for ours, theirs in zip(
        longest_continuation(tree, torch.zeros(3, dtype=torch.int64), draw, levels=3, most=2),
        walk(tree, draw, levels=3),
        strict=True,
    ):
        assert ours.tolist() == theirs.tolist()


def two_tokens(width: int, drafts: list[ToyLM], targets: list[ToyLM]) -> Tensor:
    """[M, V, V]: the law of the first two tokens of a step whose `width` initial tokens the target drew."""
    p = torch.stack([target.probs for target in targets])  # [M, H, V]
    proposer = Mcsd(Shape.k_config((width, 2)))

    def run(rng: ForkingRandom, world: Tensor) -> Tensor:
        initial = rng.sample_without_replacement(p[world, 0], width)
        drafter = ToyDrafter(drafts, world)
        rows, state = drafter.catch_up(None, None)
        request = Request(torch.ones(len(world)).double(), torch.zeros(len(world), dtype=torch.bool), rng, initial)
        levels: list[Tensor] = []
        tree, read, drawn, *_ = draft_tree(
            proposer, drafter, rows, state, nodes=9, request=request, keep=lambda level: levels.append(level)
        )
        assert (tree.tokens[:, :width] == initial).all()
        q, at = torch.cat(levels, 1).softmax(-1), torch.arange(len(world))
        laws = p[world[:, None], histories(tree, 3)]  # [R, 1 + N, V]

        def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
            idle = ~active | (node < 0)  # what the root says does not count here, and must not fork
            certain = torch.eye(3).double()[0]
            slot = torch.where(node < 0, 0, read[at, node.clamp(min=0)].clamp(min=0))
            children = Children(tree.children(node, 3).masked_fill(idle[:, None], -1), drawn[at, node + 1], 3)
            token = RULES["rrsw"].draw(
                torch.where(idle[:, None], certain, laws[at, node + 1]), q[at, slot], children, rng.fold_in(node + 1)
            )
            return token, torch.ones_like(active)

        return longest_continuation(tree, torch.full_like(world, width), draw, levels=2, most=width).tokens[:, :2]

    law = torch.zeros(len(drafts), 3, 3).double()
    for weight, world, tokens in every_outcome(run, worlds=len(drafts)):
        law.index_put_((world, tokens[:, 0], tokens[:, 1]), weight, accumulate=True)
    return law


@pytest.mark.parametrize(("width", "lossless"), [(1, True), (2, False)])
def test_one_initial_token_is_lossless_and_two_are_not(width, lossless):
    drafts = [ToyLM.random(3, 3, seed=seed) for seed in range(4)]
    targets = [ToyLM.random(3, 3, seed=100 + seed) for seed in range(4)]
    found = two_tokens(width, drafts, targets)
    exact = torch.stack([target.continuations(2).view(3, 3) for target in targets])
    distance = (found - exact).abs().sum((1, 2)) / 2
    assert found.sum((1, 2)).tolist() == pytest.approx([1.0] * 4, abs=1e-12)
    assert (distance < 1e-9).all() if lossless else (distance > 1e-2).all()


def test_a_tree_without_initial_tokens_is_drafted_as_ever():
    models, shape = models_of(5, 3, 4), Shape.k_config((2, 2, 1))
    given = torch.tensor([[3, 1], [-1, -1], [4, -1], [-1, -1]])
    ours = paths_of(grow(Mcsd(shape), models, nodes=20, initial=given))
    plain = paths_of(grow(Mcsd(shape), models, nodes=20))
    assert [ours[1], ours[3]] == [plain[1], plain[3]]
    assert [path for path in ours[0] if len(path) == 1] == [(3,), (1,)]
    assert [path for path in ours[2] if len(path) == 1] == [(4,)]
    assert [len(ours[0]), len(ours[2])] == [2 + 4 + 4, 1 + 2 + 2]
