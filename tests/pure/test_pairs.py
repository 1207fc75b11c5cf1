"""Every legal pair of a proposer and a rule keeps the target's law: all trees, all cuts, all coins, by enumeration."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.papers import optimal
from tests.oracles.growth import as_the_engine
from vllm_adaptive_tree.acceptance import RULES, Kind, legal_rules
from vllm_adaptive_tree.drafters import Frontier
from vllm_adaptive_tree.proposers import Proposer, StaticTree, best_candidates
from vllm_adaptive_tree.proposers.adaptive_tree import AdaptiveTree
from vllm_adaptive_tree.proposers.c2t import C2T, C2TOptions
from vllm_adaptive_tree.proposers.dyspec import DySpec
from vllm_adaptive_tree.proposers.eagle2 import Eagle2
from vllm_adaptive_tree.proposers.gate import Gate
from vllm_adaptive_tree.proposers.mcsd import Mcsd
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.rng import CounterRNG
from vllm_adaptive_tree.testing.drafts import Drafts, chosen_nodes, cut, every_draft, node_probs, propose
from vllm_adaptive_tree.testing.lossless import EXACT, TEMPERATURE, emitted_probs
from vllm_adaptive_tree.testing.models import Models, ToyDrafter, ToyLM, histories, random_pairs
from vllm_adaptive_tree.testing.steps import emitted, verify
from vllm_adaptive_tree.trees import Shape
from vllm_adaptive_tree.trees.orders import depth_first, heavy_path, permuted

Change = Callable[[Drafts], Drafts]

BIASED = 1e-2
IRREGULAR = Shape.of([[0], [1], [2], [0, 0], [0, 1], [0, 0, 0]])
SHAPES = {  # nodes, vocabulary
    "binary": (Shape.named("binary", 6), 6, 3),
    "over the budget": (Shape.k_config([3, 2]), 6, 3),
    "irregular": (IRREGULAR, 6, 3),
    "without its last level": (IRREGULAR, 4, 3),
    "two of four": (Shape.k_config([2, 1]), 4, 4),
    "three of four": (Shape.of([[0], [1], [2], [0, 0]]), 4, 4),
}


def models(vocabulary: int, depth: int) -> Models:
    return random_pairs(vocabulary, depth, TEMPERATURE)


def certain(pairs: Models) -> Models:
    """Targets that take their best token."""
    return pairs[0], [ToyLM(1e6 * target.logits) for target in pairs[1]]


def bias(
    proposer: Proposer,
    rule: str,
    *,
    nodes: int,
    vocabulary: int = 3,
    pairs: Models | None = None,
    **how: Any,
) -> Tensor:
    """Total variation between what is emitted and the target's law: [cuts, pairs of models]; `how`: as of
    `emitted_probs`."""
    drafts, targets = pairs or models(vocabulary, proposer.max_depth)
    law = emitted_probs(RULES[rule], proposer, (drafts, targets), nodes=nodes, **how)
    plain = torch.stack([target.continuations(proposer.max_depth + 1) for target in targets])
    return (law - plain).abs().sum(2) / 2


def gate(weights: list[float], bias: float, inputs: int) -> Gate:
    """sigmoid(weights . features + bias) of features that are not negative."""
    made = Gate(inputs, inputs)
    first, _, last = made.layers
    nn.init.eye_(first.weight)
    nn.init.zeros_(first.bias)
    with torch.no_grad():
        last.weight.copy_(torch.tensor([weights]))
        last.bias.fill_(bias)
    return made.requires_grad_(requires_grad=False)


def c2t(**options: Any) -> C2T:
    confidence = gate([4.0, -0.5, -0.5], -0.5, inputs=3)
    return C2T(confidence, C2TOptions(**{"beta": 0.4, "top_k": 2, "entropy_top": 2, "max_depth": 3} | options))


def static(kind: Kind, shape: Shape) -> StaticTree:
    return StaticTree(shape, kind=kind)


def stopping(kind: Kind) -> Mcsd:
    """Stops where the best token has less than two thirds."""
    return Mcsd(IRREGULAR, kind=kind, gate=gate([0.0, 9.0, *[0.0] * 9], -6.0, inputs=11), stop_threshold=0.5)


CHOSEN = {
    "opt_tree": lambda: OptTree(max_depth=3, threshold=0.1),
    "eagle2": lambda: Eagle2(max_depth=3, top_k=2),
    "c2t": lambda: c2t(second_pruning=True),
    "c2t without second pruning": lambda: c2t(second_pruning=False),
    "c2t chain": lambda: c2t(second_pruning=True, mode="chain"),
}
DYSPEC = {
    "heap": lambda: DySpec(max_depth=3, max_children=3, threshold=0),
    "flat heap": lambda: DySpec(max_depth=2, max_children=3, threshold=0),
    "threshold": lambda: DySpec(max_depth=3, max_children=3, threshold=0.2),
    "low threshold": lambda: DySpec(max_depth=3, max_children=2, threshold=0.02),
}


def adaptive(*, learnt: bool = True, depth: int = 3, kind: type[AdaptiveTree] = AdaptiveTree) -> AdaptiveTree:
    """Proposer with a table that is fresh, or of any numbers: by class, depth, rank and conditional probability."""
    made = kind(max_depth=depth, max_children=3, drawn_from=0.0)
    if learnt:
        generator = torch.Generator().manual_seed(depth)
        made.acceptance.chance.copy_(torch.rand(made.acceptance.chance.shape, generator=generator).clamp(0.02, 0.98))
    return made


DRAWN = {
    **DYSPEC,
    "fresh table": lambda: adaptive(learnt=False),
    "learnt table": lambda: adaptive(),
    "flat table": lambda: adaptive(depth=2),
}
KINDS: list[Kind] = ["one_hot", "without_replacement", "iid", "hub_pair", "top_k_plus_one"]
DEEP = {"heap", "table"}
"""Their trees are too many where the draft does not follow the grammar."""
LEGAL = [(kind, rule) for kind in KINDS for rule in legal_rules((kind,), 2)]


@pytest.mark.parametrize("rule", ["target_only", "traversal"])
@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_children(name, rule):
    assert bias(CHOSEN[name](), rule, nodes=6).max() < EXACT
    assert bias(CHOSEN[name](), rule, nodes=4, vocabulary=5).max() < EXACT


@pytest.mark.parametrize("rule", ["target_only", "rrsw", "traversal"])
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_children(name, rule):
    assert bias(DRAWN[name](), rule, nodes=5).max() < EXACT


@pytest.mark.parametrize("learnt", [True, False])
def test_chosen_children_of_sampled_requests(learnt):
    proposer = adaptive(learnt=learnt, depth=2)
    assert bias(proposer, "target_only", nodes=5, chosen=True).max() < EXACT
    assert bias(proposer, "rrsw", nodes=2, pairs=strangers(3, depth=2, count=4), chosen=True).max() > BIASED


class SeesItsOwnDraw(AdaptiveTree):
    def candidates(self, growth, logits):
        slots = super().candidates(growth, logits)
        return best_candidates(slots._replace(value=slots.path), growth.nodes)


def test_a_value_must_not_see_its_own_draw():
    pairs = strangers(3, depth=2, count=4)
    assert bias(adaptive(depth=2, kind=SeesItsOwnDraw), "traversal", nodes=3, pairs=pairs).max() > BIASED


@pytest.mark.parametrize(
    ("shape", "kind", "rule"),
    [
        (name, kind, rule)
        for name, (shape, _, _) in SHAPES.items()
        for kind in KINDS
        for rule in legal_rules((kind,), shape.max_children)
    ],
)
def test_static_trees(shape, kind, rule):
    paths, nodes, vocabulary = SHAPES[shape]
    assert bias(static(kind, paths), rule, nodes=nodes, vocabulary=vocabulary).max() < EXACT


@pytest.mark.parametrize(("kind", "rule"), LEGAL)
def test_mcsd_stops(kind, rule):
    assert bias(stopping(kind), rule, nodes=6).max() < EXACT


def test_mcsd_stops_at_several_depths():
    drafts, _ = models(3, 3)
    trees = every_draft(stopping("without_replacement"), drafts, nodes=6).tree
    assert set(trees.depth.amax(1).tolist()) == {1, 2, 3}


def narrow(frontier: Frontier, growing: Tensor) -> tuple[Frontier, bool]:
    """One column, used ones trimmed too."""
    return Frontier(frontier.tokens[:, :1], frontier.parent[:, :1]), True


@pytest.mark.parametrize("name", [*CHOSEN, *DRAWN])
def test_narrow_levels(name):
    proposer = {**CHOSEN, **DRAWN}[name]()
    widest = every_draft(proposer, models(3, proposer.max_depth)[0], nodes=5, agree=narrow).tree
    parents = [{*row.tolist()} - {-1} for row in widest.parent.masked_fill(widest.depth != 2, -1)]
    assert max(map(len, parents)) <= 1, "one node of a level has children"
    for rule in legal_rules(proposer.kinds, 3):
        assert bias(proposer, rule, nodes=5, agree=narrow).max() < EXACT


@pytest.mark.parametrize(("kind", "rule"), LEGAL)
def test_narrow_levels_of_a_shape(kind, rule):
    assert bias(static(kind, IRREGULAR), rule, nodes=6, agree=narrow).max() < EXACT


def reduced(depth: int) -> Models:
    """Drafts that know two of the target's four tokens, as a head with a vocabulary of its own does."""
    drafts, targets = models(4, depth)
    unknown = torch.tensor([True, False, False, True])
    return [ToyLM(draft.logits.masked_fill(unknown, -torch.inf)) for draft in drafts], targets


@pytest.mark.parametrize(
    ("children", "kind", "rule"),
    [(first, kind, rule) for first in (2, 3) for kind in KINDS for rule in legal_rules((kind,), first)],
)
def test_reduced_vocabulary(children, kind, rule):
    """Also with more children than the draft knows tokens."""
    assert bias(static(kind, Shape.k_config([children, 2])), rule, nodes=4, pairs=reduced(2)).max() < EXACT


@pytest.mark.parametrize("name", [*CHOSEN, *DRAWN])
def test_reduced_vocabulary_of_other_proposers(name):
    proposer = {**CHOSEN, **DRAWN}[name]()
    for rule in legal_rules(proposer.kinds, 3):
        assert bias(proposer, rule, nodes=4, pairs=reduced(proposer.max_depth)).max() < EXACT


def under_a_grammar(depth: int, *, drafts: bool = True) -> Models:
    """Pairs of four tokens, of which a grammar allows one, two or three, by the path; `drafts`: those follow it too."""
    own, targets = models(4, depth)
    histories = torch.arange(len(own[0].logits))[:, None]
    allowed = (histories * 7 + torch.arange(4)) % 4 <= (histories + 2) % 3
    assert set(allowed.sum(1).tolist()) == {1, 2, 3}
    known, wanted = (
        [ToyLM(torch.where(allowed, model.logits.clamp(min=-20), -torch.inf)) for model in side]
        for side in (own, targets)
    )
    return known if drafts else own, wanted


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize(
    ("children", "kind", "rule"),
    [(first, kind, rule) for first in (2, 3) for kind in KINDS for rule in legal_rules((kind,), first)],
)
def test_grammar(children, kind, rule, drafts):
    """Also with more children than the grammar allows, and with children that it rejects."""
    pairs = under_a_grammar(2, drafts=drafts)
    assert bias(static(kind, Shape.k_config([children, 2])), rule, nodes=4, pairs=pairs).max() < EXACT


@pytest.mark.parametrize(
    ("name", "drafts"),
    [(name, drafts) for name in (*CHOSEN, *DRAWN) for drafts in (True, False) if drafts or not DEEP & {*name.split()}],
)
def test_grammar_of_other_proposers(name, drafts):
    proposer = {**CHOSEN, **DRAWN}[name]()
    pairs = under_a_grammar(proposer.max_depth, drafts=drafts)
    for rule in legal_rules(proposer.kinds, 3):
        assert bias(proposer, rule, nodes=4, pairs=pairs).max() < EXACT


@pytest.mark.parametrize(("kind", "rule"), LEGAL)
def test_greedy_requests_get_the_argmax(kind, rule):
    assert bias(static(kind, IRREGULAR), rule, nodes=6, pairs=certain(models(3, 3)), greedy=True).max() < EXACT


@pytest.mark.parametrize("name", [*CHOSEN, *DRAWN])
def test_greedy_requests_of_other_proposers(name):
    proposer = {**CHOSEN, **DRAWN}[name]()
    pairs = certain(models(3, proposer.max_depth))
    for rule in legal_rules(proposer.kinds, 3):
        assert bias(proposer, rule, nodes=4, pairs=pairs, greedy=True).max() < EXACT


@pytest.mark.parametrize(("kind", "rule"), LEGAL)
def test_float32(kind, rule):
    """Rounding is all that single precision adds."""
    drafts, targets = ([ToyLM(model.logits.float()) for model in side] for side in models(3, 2))
    assert bias(static(kind, SHAPES["binary"][0]), rule, nodes=6, pairs=(drafts, targets)).max() < 1e-6


# What the checks above would see.


def strangers(vocabulary: int = 4, depth: int = 1, count: int = 40) -> Models:
    """Pairs that have nothing to do with each other."""
    draft, target = (
        [ToyLM.random(vocabulary, depth, seed=seed + side, scale=1.0) for seed in range(count)] for side in (0, 1000)
    )
    return draft, target


SPECHUB_TAKES_ANY_SECOND = ("without_replacement", "spechub")  # unless the first is the hub, it does not look
WRONG = [
    (kind, rule)
    for kind in KINDS
    for rule in RULES
    if kind not in RULES[rule].kinds and (kind, rule) != SPECHUB_TAKES_ANY_SECOND
]


@pytest.mark.parametrize(("kind", "rule"), LEGAL)
def test_a_node_without_its_mask_is_biased(kind, rule):
    drafts, targets = under_a_grammar(2)
    trees = every_draft(static(kind, Shape.k_config([2, 2])), drafts, nodes=4, temperature=TEMPERATURE)
    law = torch.stack([target.continuations(3) for target in targets])
    assert (emitted(trees, targets, RULES[rule], kind, length=3).probs - law).abs().sum(1).max() / 2 < EXACT
    for target, free in zip(targets, models(4, 2)[1], strict=True):
        target.probs[2] = free.probs[2]
    assert (emitted(trees, targets, RULES[rule], kind, length=3).probs - law).abs().sum(1).max() / 2 > BIASED


@pytest.mark.parametrize("rule", ["rrs", "rrsw"])
def test_a_draft_cut_where_its_grammar_rejects_it_is_biased(rule):
    """A child that was sampled and then dropped looks like one that was never sampled."""

    def cut_at_rejected(trees: Drafts) -> Drafts:
        return cut(trees, (trees.tree.tokens != 3).cumprod(1).sum(1))

    proposer = static(RULES[rule].kinds[0], Shape.k_config([2]))
    drafts, targets = under_a_grammar(1, drafts=False)
    assert all(target.probs[0, 3] == 0 for target in targets)
    assert bias(proposer, rule, nodes=2, pairs=(drafts, targets)).max() < EXACT
    assert bias(proposer, rule, nodes=2, pairs=(drafts, targets), change=cut_at_rejected).max() > BIASED


@pytest.mark.parametrize(("kind", "rule"), WRONG)
def test_every_other_pair_is_biased(kind, rule):
    assert bias(static(kind, Shape.k_config([2])), rule, nodes=2, pairs=strangers()).max() > BIASED


@pytest.mark.parametrize("kind", KINDS)
def test_traversal_must_be_told_the_kind(kind):
    """Any tree may pass for a chosen one: what is taken as given cannot be wrong."""
    for told in KINDS:
        worst = bias(static(kind, Shape.k_config([2])), "traversal", nodes=2, pairs=strangers(), told=told).max()
        assert (worst < EXACT) if told in (kind, "one_hot") else (worst > BIASED)


@pytest.mark.parametrize("order", [depth_first, heavy_path])
def test_only_generation_order_may_be_cut(order):
    """Depth first the whole tree is exact still; by heavy paths siblings change places, and it is not."""

    def reordered(drafts: Drafts) -> Drafts:
        return in_order(drafts, order(drafts.tree.parent, drafts.tree.valid))

    pairs = strangers(vocabulary=3, depth=2, count=8)
    proposer = DySpec(max_depth=2, max_children=3, threshold=0)
    assert bias(proposer, "rrsw", nodes=4, pairs=pairs).max() < EXACT
    worst = bias(proposer, "rrsw", nodes=4, pairs=pairs, change=reordered).amax(1)  # [cuts]
    assert worst.max() > BIASED
    assert (worst[-1] < EXACT) == (order is depth_first)


@pytest.mark.parametrize("rule", ["rrsw", "traversal", "target_only"])
def test_drawn_children_must_not_be_pruned_by_their_probability(rule):
    worst = bias(DYSPEC["heap"](), rule, nodes=4, change=unlikely_pruned).max()
    assert (worst < EXACT) if rule == "target_only" else (worst > BIASED)


def in_order(drafts: Drafts, ranks: Tensor) -> Drafts:
    """Node ranks[r, i] in slot i; the root stays in front."""
    entries = torch.nn.functional.pad(ranks + 1, (1, 0))
    return drafts._replace(
        tree=permuted(drafts.tree, ranks),
        q=drafts.q.gather(1, entries[..., None].expand_as(drafts.q)),
        drawn=drafts.drawn.gather(1, entries),
        chosen=drafts.chosen.gather(1, ranks),
    )


def unlikely_pruned(drafts: Drafts) -> Drafts:
    """Without the nodes that the draft gave less than 0.4, and what hangs below them."""
    tree = drafts.tree
    above = drafts.q.gather(1, (tree.parent + 1)[..., None].expand(-1, -1, drafts.q.shape[2]))
    keep = tree.valid & (above.gather(2, tree.tokens.clamp(min=0)[..., None])[..., 0] > 0.4)
    for node in range(keep.shape[1]):
        parent = tree.parent[:, node, None]
        keep[:, node] &= (parent < 0)[:, 0] | keep.gather(1, parent.clamp(min=0))[:, 0]
    pruned = in_order(drafts, keep.int().argsort(dim=1, descending=True, stable=True))
    return pruned._replace(tree=pruned.tree.cut(keep.sum(1)))


# How much is accepted.


def accepted(proposer: Proposer, rule: str, pairs: Models, nodes: int) -> Tensor:
    """Accepted tokens of every pair of models, on average."""
    drafts = every_draft(proposer, pairs[0], nodes=nodes)
    return emitted(drafts, pairs[1], RULES[rule], proposer.kind, length=1).accepted


CLOSED_FORMS = {
    ("rrs", "iid", 2): lambda p, q: optimal.rrs_acceptance(p, q, 2),
    ("rrs", "iid", 3): lambda p, q: optimal.rrs_acceptance(p, q, 3),
    ("spechub", "hub_pair", 2): optimal.spechub_acceptance,
    ("greedy_multi_draft", "top_k_plus_one", 2): lambda p, q: optimal.greedy_multi_draft_acceptance(p, q, 2),
    ("greedy_multi_draft", "top_k_plus_one", 3): lambda p, q: optimal.greedy_multi_draft_acceptance(p, q, 3),
    ("target_only", "one_hot", 2): lambda p, q: optimal.target_only_acceptance(p, q.topk(2).indices.tolist()),
    ("traversal", "one_hot", 3): lambda p, q: optimal.target_only_acceptance(p, q.topk(3).indices.tolist()),
    ("traversal", "iid", 2): lambda p, q: optimal.rrs_acceptance(p, q, 2),
}


@pytest.mark.parametrize(("rule", "kind", "children"), CLOSED_FORMS)
def test_acceptance_of_one_node(rule, kind, children):
    drafts, targets = strangers()
    found = accepted(static(kind, Shape.k_config([children])), rule, (drafts, targets), children)
    closed_form = CLOSED_FORMS[rule, kind, children]
    expected = [closed_form(target.probs[0], draft.probs[0]) for draft, target in zip(drafts, targets, strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize(("rule", "kind"), [("rrsw", "without_replacement"), ("k_seq", "iid")])
def test_acceptance_of_one_node_is_bounded(rule, kind):
    drafts, targets = strangers()
    found = accepted(static(kind, Shape.k_config([2])), rule, (drafts, targets), 2).tolist()
    for alpha, draft, target in zip(found, drafts, targets, strict=True):
        p, q = target.probs[0], draft.probs[0]
        assert alpha <= optimal.optimal_acceptance(p, q, 2, kind) + EXACT
        assert alpha >= torch.minimum(p, q).sum() - EXACT
        if rule == "k_seq":
            assert alpha >= optimal.k_seq_acceptance(p, q, 2) - EXACT  # or more: the residual may hit a child


@pytest.mark.parametrize("name", [*DYSPEC, "binary"])
def test_traversal_accepts_no_less_than_rrsw(name):
    proposer = static("without_replacement", SHAPES["binary"][0]) if name == "binary" else DYSPEC[name]()
    by_level, by_leaf = (accepted(proposer, rule, models(3, 3), 4) for rule in ("rrsw", "traversal"))
    assert (by_leaf >= by_level - EXACT).all()
    assert (by_leaf > by_level + 1e-3).any()


# Batches.


MIXED = {(f"mcsd {kind}", rule): lambda kind=kind: stopping(kind) for kind, rule in LEGAL if rule != "target_only"}
MIXED |= {(name, rule): DYSPEC[name] for name in ("heap", "threshold") for rule in ("rrsw", "traversal")}


@pytest.mark.parametrize(("name", "rule"), MIXED)
def test_requests_do_not_see_each_other(name, rule):
    """With the same seed a request gets the same tokens in a batch as alone, at any depth of the others."""
    proposer = MIXED[name, rule]()
    drafts, targets = models(3, 3)
    depths, lengths = set(), set()
    for turn in range(2):
        seeds = [10 * turn + r for r in range(len(drafts))]
        together = step(proposer, rule, drafts, targets, seeds)
        alone = [step(proposer, rule, [q], [p], [seed])[0] for q, p, seed in zip(drafts, targets, seeds, strict=True)]
        assert together == alone
        depths |= {depth for depth, _ in together}
        lengths |= {len(tokens) for _, tokens in together}
    assert len(depths) > 1
    assert max(lengths) > 1


def step(
    proposer: Proposer, rule: str, drafts: list[ToyLM], targets: list[ToyLM], seeds: list[int]
) -> list[tuple[int, list[int]]]:
    """One keyed step of each request: the depth of its tree and the tokens emitted."""

    def rng(purpose: int) -> CounterRNG:
        return CounterRNG(torch.tensor(seeds), torch.full((len(seeds),), 7), purpose)

    levels: list[Tensor] = []
    proposal = propose(proposer, ToyDrafter(drafts), nodes=5, rng=rng(0), keep=levels.append, agree=as_the_engine)
    requests = torch.arange(len(seeds))
    made = Drafts(
        torch.ones(len(seeds)),
        requests,
        proposal.tree,
        *node_probs(proposal, levels, 1.0),
        chosen_nodes(proposal),
        min(5, proposer.max_children),
    )
    p = torch.stack([target.probs for target in targets])[requests[:, None], histories(proposal.tree, 3)]
    tokens = verify(made, p, RULES[rule], proposer.kind, rng(1)).tokens.tolist()
    return [
        (int(depths.max()), [token for token in row if token >= 0])
        for depths, row in zip(proposal.tree.depth, tokens, strict=True)
    ]
