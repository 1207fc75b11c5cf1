"""The whole law of what OPT-Tree and `target_only` emit, by enumeration."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted, target_only
from vllm_adaptive_tree.trees import TokenTree, TreeBatch

from .toys import ForkingRandom, Path, ToyLM, every_outcome, grow_trees, on_device, on_host, paths, random_tree

Draw = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def law_below(model: ToyLM, tree: TreeBatch) -> Callable[[Tensor], Tensor]:
    """node [1] -> the model's law behind that node [1, V]"""
    histories = [0, *(model.history(path) for path in paths(on_host(tree)[0]))]
    return lambda node: model.law[[histories[node.item() + 1]]]


def total_variation(law: Tensor, other: Tensor) -> float:
    assert law.sum().item() == pytest.approx(1)
    return (law - other).abs().sum().item() / 2


def emitted_law(run: Callable[[ForkingRandom], Path], target: ToyLM, length: int) -> Tensor:
    """The law [V ** length] of the tokens of one run, continued by the target."""
    law = torch.zeros(target.vocabulary**length, dtype=torch.float64)
    for weight, tokens in every_outcome(run):
        rest = target.continuations(max(0, length - len(tokens)), tokens)  # [V ** missing]
        first = int("".join(map(str, tokens[:length])), target.vocabulary) * len(rest)
        law[first : first + len(rest)] += weight * rest
    return law


def walk(tree: TreeBatch, model: ToyLM, random: ForkingRandom) -> Accepted:
    law = law_below(model, tree)
    return target_only(
        tree,
        lambda node, active: (random.choose(law(node)), torch.ones_like(active)),
        levels=int(tree.depth.max()),
        proceed=lambda active: bool(active.any()),
    )


def emitted(accepted: Accepted) -> list[Path]:
    return [tuple(token for token in row if token >= 0) for row in accepted.tokens.tolist()]


def error(tree: TreeBatch, target: ToyLM, length: int, *, drawn_from: ToyLM | None = None) -> float:
    law = emitted_law(lambda random: emitted(walk(tree, drawn_from or target, random))[0], target, length)
    return total_variation(law, target.continuations(length))


SETTINGS = [(3, 2, 0), (4, 2, 1), (3, 3, 2)]  # vocabulary, depth, seed


def pair(vocabulary: int, depth: int, seed: int) -> tuple[ToyLM, TreeBatch]:
    """A target, and a draft's tree for it."""
    draft = ToyLM.random(vocabulary, depth, seed=seed, scale=1.5)
    target = ToyLM(draft.logits + ToyLM.random(vocabulary, depth, seed=seed + 100, scale=1.5).logits)
    return target, grow_trees([draft], nodes=6, max_depth=depth)


@pytest.mark.parametrize("nodes", range(1, 7))
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_cut_of_the_tree_keeps_the_law(setting, nodes):
    target, tree = pair(*setting)
    assert on_host(tree)[0].depths.count(2) > 1
    assert error(tree.cut(torch.tensor([nodes])), target, length=setting[1] + 1) < 1e-9


@pytest.mark.parametrize("setting", SETTINGS)
def test_chains_keep_the_law(setting):
    target, tree = pair(*setting)
    chain = on_device([on_host(tree)[0].first_path()])
    assert error(chain, target, length=setting[1] + 1) < 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_any_tree_keeps_the_law(seed):
    target = ToyLM.random(3, 6, seed=seed)
    assert error(on_device([random_tree(5, vocabulary=3, seed=seed)]), target, length=4) < 1e-9


@pytest.mark.parametrize("setting", SETTINGS)
def test_mean_acceptance_is_the_targets_mass_on_the_tree(setting):
    target, tree = pair(*setting)
    outcomes = every_outcome(lambda random: walk(tree, target, random))
    mean = sum(weight * (accepted.nodes >= 0).sum().item() for weight, accepted in outcomes)
    assert mean == pytest.approx(sum(map(target.probability, paths(on_host(tree)[0]))), abs=1e-12)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_check_sees_draws_from_the_draft(setting):
    target, tree = pair(*setting)
    draft = ToyLM.random(setting[0], setting[1], seed=setting[2], scale=1.5)
    assert error(tree, target, length=setting[1] + 1, drawn_from=draft) > 1e-2


def rejection_sampling(p: Tensor, q: Tensor, children: Tensor, random: ForkingRandom) -> int:
    """Sequential rejection for children [1, k] drawn from q [1, V] without replacement, in their order."""
    for child in children.unbind(1):
        if random.accept((p[0, child] / q[0, child]).clamp(max=1)):
            return child.item()
        p = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
        q = q.index_fill(1, child, 0.0)
        q = q / q.sum()
    return random.choose(p).item()


@pytest.mark.parametrize("seed", range(4))
def test_the_check_tells_a_legal_rule_from_a_biased_one(seed):
    """The same rule is exact for sampled children and wrong for the q-best ones, which are always proposed."""
    draft, target = ToyLM.random(4, 1, seed=seed, scale=1.0), ToyLM.random(4, 1, seed=seed + 50, scale=1.0)
    p, q = target.law[:1], draft.law[:1]

    def sampled(random: ForkingRandom) -> Path:
        return (rejection_sampling(p, q, random.draw_without_replacement(q, 2), random),)

    def best(random: ForkingRandom) -> Path:
        return (rejection_sampling(p, q, q.topk(2).indices, random),)

    plain = target.continuations(2)
    assert total_variation(emitted_law(sampled, target, 2), plain) < 1e-9
    assert total_variation(emitted_law(best, target, 2), plain) > 1e-2


def test_a_greedy_target_emits_its_argmax_chain():
    targets = [ToyLM.random(3, 5, seed=seed) for seed in range(8)]
    drafts = [ToyLM(t.logits + ToyLM.random(3, 5, seed=90 + r).logits) for r, t in enumerate(targets)]
    tree = grow_trees(drafts, nodes=6, max_depth=4)
    trees = on_host(tree)
    histories = [[0, *(t.history(path) for path in paths(one))] for t, one in zip(targets, trees, strict=True)]

    def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        rows = [t.logits[h[at + 1]] for t, h, at in zip(targets, histories, node.tolist(), strict=True)]
        return torch.stack(rows).argmax(1), torch.ones_like(active)

    accepted = target_only(tree, draw, levels=4)
    lengths = set()
    for r, tokens in enumerate(emitted(accepted)):
        for at, token in enumerate(tokens):
            assert token == targets[r].logits[targets[r].history(tokens[:at])].argmax()
        assert tokens not in paths(trees[r]), "the last token is the one that the tree lacks"
        nodes = [node for node in accepted.nodes[r].tolist() if node >= 0]
        assert [paths(trees[r])[node] for node in nodes] == [tokens[:n] for n in range(1, len(tokens))]
        lengths.add(len(tokens))
    assert len(lengths) > 2


def walk_chains(draw: Draw, **options: Callable[[Tensor], bool]) -> Accepted:
    return target_only(on_device([TokenTree.chain([1, 1, 1]), TokenTree.chain([1])]), draw, levels=3, **options)


def always_one(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(node), torch.ones_like(active)


def test_padding_behind_the_walk():
    accepted = walk_chains(always_one)
    assert accepted.tokens.tolist() == [[1, 1, 1, 1], [1, 1, -1, -1]]
    assert accepted.nodes.tolist() == [[0, 1, 2, -1], [0, -1, -1, -1]]


def test_rows_that_have_ended_stay_ended():
    """The first request leaves the tree at once; what is drawn for it afterwards would lead back into the tree."""
    draws = iter([[0, 1], [1, 1], [1, 1], [1, 1]])
    tree = on_device([TokenTree.chain([1, 1, 1])] * 2)
    accepted = target_only(tree, lambda node, active: (torch.tensor(next(draws)), torch.ones_like(active)), levels=3)
    assert accepted.tokens.tolist() == [[0, -1, -1, -1], [1, 1, 1, 1]]
    assert accepted.nodes.tolist() == [[-1, -1, -1, -1], [0, 1, 2, -1]]


@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_may_go_on_ends_the_walk_behind_the_token(last):
    """The first request may not go on below depth `last`; the second request does not notice."""
    depth_of_node = torch.tensor([1, 2, 3, 0])  # -1 is the root
    accepted = walk_chains(lambda node, active: (torch.ones_like(node), depth_of_node[node] < torch.tensor([last, 9])))
    assert emitted(accepted) == [(1,) * (last + 1), (1, 1)]
    assert (accepted.nodes >= 0).sum(1).tolist() == [last, 1]


def test_proceed_only_saves_the_idle_rounds():
    stopped = walk_chains(lambda node, active: (2 - active.long(), active), proceed=lambda active: bool(active.any()))
    assert stopped.tokens.tolist() == walk_chains(always_one).tokens.tolist()
    short = target_only(
        on_device([TokenTree.chain([0, 0, 0])]), always_one, levels=3, proceed=lambda active: bool(active.any())
    )
    assert short.tokens.tolist() == [[1]]
    assert short.nodes.tolist() == [[-1]]
