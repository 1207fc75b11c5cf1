"""A row of the draft that gives no law: nothing is revealed behind it, and nobody else notices."""

import math
from typing import Any

import pytest
import torch

from tests.oracles.growth import as_the_engine, grow
from tests.oracles.trees import on_device
from vllm_adaptive_tree.acceptance import RULES, Children, legal_rules, traversal
from vllm_adaptive_tree.budget.acceptance_model import Calibration
from vllm_adaptive_tree.drafters import Rows
from vllm_adaptive_tree.proposers import Request, StaticTree, draft_tree
from vllm_adaptive_tree.proposers.gate import Gate
from vllm_adaptive_tree.proposers.mcsd import Mcsd
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.proposers.opt_tree_cpu import OptTreeCPU
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.testing.drafts import keyed
from vllm_adaptive_tree.testing.models import ToyDrafter, ToyLM
from vllm_adaptive_tree.testing.well_formed import paths_of
from vllm_adaptive_tree.trees import Shape, TokenTree

from .test_pairs import CHOSEN, DYSPEC, EXACT, IRREGULAR, KINDS, LEGAL, Models, bias, models, static, stopping

NAN, INF = math.nan, math.inf
DEAD = {"NaN": NAN, "+Inf": INF, "-Inf throughout": -INF}


def poisoned(model: ToyLM, value: float, path: tuple[int, ...] = ()) -> ToyLM:
    """Dead behind `path`: one NaN or +Inf, or nothing but -Inf."""
    logits = model.logits.clone()
    row = logits[model.history(path)]
    row[-1:] = value
    if value == -INF:
        row[:] = value
    return ToyLM(logits)


PLACES: list[tuple[int, ...]] = [(), (0,), (1,), (2,), (1, 0)]


def with_dead_rows(vocabulary: int, depth: int) -> Models:
    """In every draft one row is dead: a root, or nodes of two levels; the last one is sound."""
    drafts, targets = models(vocabulary, depth)
    kinds = [NAN, INF, -INF]
    pairs = [*zip(drafts[:2], targets[:2], strict=True)] * 3
    bad = [
        poisoned(draft, kinds[at % 3], path if len(path) < depth else ())
        for at, ((draft, _), path) in enumerate(zip(pairs, [*PLACES, ()], strict=True))
    ]
    return [*bad, drafts[0]], [*(target for _, target in pairs), targets[0]]


@pytest.mark.parametrize("rule", ["target_only", "traversal"])
@pytest.mark.parametrize("name", [*CHOSEN, "on the host"])
def test_the_law_of_chosen_children(name, rule):
    proposer = OptTreeCPU(max_depth=3, threshold=0.1) if name == "on the host" else CHOSEN[name]()
    assert bias(proposer, rule, nodes=5, pairs=with_dead_rows(3, 3)).max() < EXACT


@pytest.mark.parametrize("rule", ["target_only", "rrsw", "traversal"])
@pytest.mark.parametrize("name", DYSPEC)
def test_the_law_of_dyspec(name, rule):
    proposer = DYSPEC[name]()
    assert bias(proposer, rule, nodes=4, pairs=with_dead_rows(3, proposer.max_depth)).max() < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [Shape.named("binary", 6), IRREGULAR])
def test_the_law_of_static_trees(shape, rule):
    for kind in KINDS:
        if rule in legal_rules((kind,), shape.max_children):
            assert bias(static(kind, shape), rule, nodes=5, pairs=with_dead_rows(3, shape.depth)).max() < EXACT


@pytest.mark.parametrize(("kind", "rule"), LEGAL)
def test_the_law_of_a_tree_that_stops(kind, rule):
    assert bias(stopping(kind), rule, nodes=5, pairs=with_dead_rows(3, 3)).max() < EXACT


class Unaware(StaticTree):
    """Someone's proposer, which draws children behind dead rows too."""

    def extend(self, growth, rows):
        return super().extend(growth, rows._replace(dead=torch.zeros_like(rows.dead)))


@pytest.mark.parametrize(("kind", "rule"), LEGAL)
def test_the_law_where_a_proposer_does_not_ask(kind, rule):
    proposer = Unaware(Shape.named("binary", 4), kind=kind)
    assert bias(proposer, rule, nodes=4, pairs=with_dead_rows(3, 2)).max() < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_requests(kind):
    drafts, targets = with_dead_rows(3, 3)
    certain = [ToyLM(1e6 * target.logits) for target in targets]
    for rule in legal_rules((kind,), 2):
        assert bias(static(kind, IRREGULAR), rule, nodes=5, pairs=(drafts, certain), greedy=True).max() < EXACT


PROPOSERS: dict[str, Any] = {**CHOSEN, **DYSPEC, "on the host": lambda: OptTreeCPU(max_depth=3, threshold=0.1)}
PROPOSERS |= {f"static, {kind}": lambda kind=kind: StaticTree(IRREGULAR, kind=kind) for kind in KINDS}
PROPOSERS |= {f"mcsd, {kind}": lambda kind=kind: stopping(kind) for kind in KINDS}


@pytest.mark.parametrize("vocabulary", [3, 70])
@pytest.mark.parametrize("value", DEAD.values(), ids=DEAD)
@pytest.mark.parametrize("name", PROPOSERS)
def test_only_what_is_behind_it_is_lost(name, value, vocabulary):
    """The trees of others are those of a sound batch; of its own, only the subtree."""
    sound = [ToyLM.random(vocabulary, 2, seed=seed, scale=1.5, dtype=torch.float32) for seed in range(4)]
    proposer, shared = PROPOSERS[name](), {"nodes": 6, "agree": as_the_engine}
    proposer.max_depth = min(proposer.max_depth, 3)

    def trees(batch: list[ToyLM], **options: Any) -> tuple[Any, Any]:
        proposal = grow(proposer, batch, **shared, **options)
        return proposal, paths_of(proposal)

    before, expected = trees(sound)
    lost: list[torch.Tensor] = []
    inner = next((path for path in expected[1] if len(path) == 1), ())
    dead = [sound[0], poisoned(sound[1], value, inner), poisoned(sound[2], value), sound[3]]
    proposal, found = trees(dead, lost=lost.append)
    assert found[0] == expected[0]
    assert found[3] == expected[3]
    assert found[2] == []
    assert proposal.num_planned[2, 0] == 0
    assert inner
    assert inner in found[1], "the node itself is as good as any"
    assert not [path for path in found[1] if path[:1] == inner and len(path) > 1]
    assert {path for path in expected[1] if path[:1] != inner} <= set(found[1])
    at = found[1].index(inner)
    assert proposal.read[1, at] == -1
    assert proposal.num_planned[1, 1 + at] == 0
    read = int(before.read[1, expected[1].index(inner)] >= 0)
    assert torch.cat(lost, 1).sum(1).tolist() == [0, read, 1, 0]


def test_room_goes_to_the_other_branches():
    """OPT-Tree: of all paths that do not lead through the dead row the n most probable."""
    model = ToyLM.random(5, 3, seed=3, scale=1.0, dtype=torch.float64)
    for proposer in (OptTree(max_depth=3, threshold=0.0), OptTreeCPU(max_depth=3, threshold=0.0)):
        best = paths_of(grow(proposer, [model], nodes=1))[0][0]
        found = paths_of(grow(proposer, [poisoned(model, NAN, best)], nodes=12, agree=as_the_engine))[0]
        paths = [path for length in (1, 2, 3) for path in torch.cartesian_prod(*[torch.arange(5)] * length).tolist()]
        paths = [tuple(path) if isinstance(path, list) else (path,) for path in paths]
        left = [path for path in paths if path[:1] != best or len(path) == 1]
        assert found == sorted(left, key=lambda path: -model.probability(path))[:12]


def test_a_law_that_the_temperature_takes_away():
    """Rows are dead by logits / temperature: finite ones may be too large, and single -Inf are banned tokens."""
    logits = torch.tensor([[3e38, 0.0, 0.0], [-3e38, -3e38, -3e38], [-INF, 0.0, -INF], [1e30, -3e38, 0.0]])
    lost: list[torch.Tensor] = []
    drafter = ToyDrafter([ToyLM(row[None]) for row in logits])
    proposer = OptTree(max_depth=1, threshold=0.0)
    tree = grow(proposer, drafter.which.tolist(), nodes=2, temperature=0.5, drafter=drafter, lost=lost.append).tree
    assert torch.cat(lost, 1).flatten().tolist() == [True, True, False, False]
    assert tree.tokens[:, 0].tolist() == [-1, -1, 1, 0]


def test_hidden_states_that_are_not_finite_stop_their_own_tree():
    """The gate of type 1 reads them, also where the logits are fine."""
    gate = Gate(4)
    torch.nn.init.zeros_(gate.layers[0].weight)
    torch.nn.init.constant_(gate.layers[0].bias, 5.0)
    proposer = Mcsd(Shape.k_config([1, 1]), gate=gate, reads="hidden", stop_threshold=0.5)

    class WithStates:
        def grow(self, tokens, parent, state):
            return Rows(torch.zeros(*tokens.shape, 3), torch.zeros(*tokens.shape, 4)), state

    hidden = torch.zeros(2, 1, 4)
    hidden[0, 0, 1] = NAN
    request = Request(torch.ones(2), torch.zeros(2, dtype=torch.bool), keyed(2))
    tree = draft_tree(proposer, WithStates(), Rows(torch.zeros(2, 1, 3), hidden), None, nodes=2, request=request).tree
    assert tree.depth.amax(1).tolist() == [1, 2]
    assert gate(torch.tensor([[NAN, 0.0, 0.0, 0.0]])).tolist() == [0.0]


class Extreme(CounterRNG):
    """The smallest or the largest number in every draw."""

    number = 0.0

    def _uniform(self, number):
        return torch.full(self.key.shape, self.number, dtype=torch.float64)


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", [1, 5, 63, 64, 65, 100, 129, 1000])
def test_a_draw_is_a_token_that_has_mass(vocabulary, dtype, number):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 8 * torch.randn(40, vocabulary, generator=generator, dtype=dtype)
    logits[:20, 1:] = logits[:20, 1:].masked_fill(torch.rand(20, vocabulary - 1, generator=generator) < 0.5, -INF)
    logits[20:30, vocabulary // 2 + 1 :] = -INF
    logits[30:, : vocabulary // 2] = -INF
    law = logits.softmax(-1)
    law[::3] *= 1e-30  # laws need not sum to 1
    rng = Extreme(torch.arange(40), torch.zeros(40, dtype=torch.int64), purpose=0)
    rng.number = number
    token = rng.sample(law)
    assert token.max() < vocabulary
    assert (law.gather(1, token[:, None]) > 0).all()
    drawn = rng.sample_without_replacement(law, min(vocabulary, 4))
    assert (law.gather(1, drawn.clamp(min=0))[drawn >= 0] > 0).all()


@pytest.mark.parametrize("vocabulary", [5, 65, 100])
def test_a_law_that_is_none_gives_a_token_of_the_vocabulary(vocabulary):
    rng = CounterRNG(torch.arange(3), torch.zeros(3, dtype=torch.int64), purpose=0)
    law = torch.zeros(3, vocabulary)
    law[1], law[2, 0] = NAN, NAN
    assert ((rng.sample(law) >= 0) & (rng.sample(law) < vocabulary)).all()
    assert rng.sample_without_replacement(law, 2).tolist() == [[-1, -1]] * 3


@pytest.mark.parametrize("rule", RULES)
def test_a_target_that_gives_no_law(rule):
    """That request gets some token, as vLLM would give it one; the others get theirs."""
    vocabulary = 70
    p, q = (torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed)).softmax(1) for seed in range(2))
    bad = p.clone()
    bad[1, 3] = NAN
    tokens = torch.tensor([[4, 9]] * 3)
    drawn = torch.full((3,), 2)

    def step(law: torch.Tensor) -> list[int]:
        rng = CounterRNG(torch.arange(3), torch.zeros(3, dtype=torch.int64), purpose=1)
        draw, kind = RULES[rule].draw, RULES[rule].kinds[0]
        if draw is not None:
            return draw(law, q, Children(tokens, drawn, 2), rng).tolist()
        tree = on_device([TokenTree((4, 9), (-1, -1))] * 3)
        found = traversal(tree, kind, lambda node, active: law, lambda node: (q, drawn), rng, levels=1, most=2)
        return found.tokens[:, 0].tolist()

    sound, found = step(p), step(bad)
    assert [found[0], found[2]] == [sound[0], sound[2]]
    assert 0 <= found[1] < vocabulary


def test_calibration_takes_no_value_for_a_chance():
    calibration = Calibration()
    value, depth = torch.tensor([0.5, NAN, 0.0]), torch.tensor([1, 1, 2])
    chance = calibration(value, depth).tolist()
    assert chance[0] > 0
    assert chance[1:] == [0.0, 0.0]
    calibration.observe(value.tolist(), depth.tolist(), [True, False, False])
    assert calibration.predicted == pytest.approx(chance[0])
