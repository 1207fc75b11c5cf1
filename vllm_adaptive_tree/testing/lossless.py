"""Check that a rule keeps the target's distribution, by enumeration."""

from collections.abc import Callable
from copy import copy
from itertools import product
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import KINDS, RULES, Kind, Rule
from vllm_adaptive_tree.proposers import Proposer, StaticTree
from vllm_adaptive_tree.proposers.base import softmax_at
from vllm_adaptive_tree.testing.drafts import Drafts, every_cut, every_draft
from vllm_adaptive_tree.testing.models import Models, Path, ToyLM, one_thread, random_pairs
from vllm_adaptive_tree.testing.steps import emitted
from vllm_adaptive_tree.trees import Shape

EXACT = 1e-9
"""Total variation up to which two distributions are equal; the rest is rounding."""
TEMPERATURE = 0.7  # of the drafts
SHAPES = [Shape.k_config([1]), Shape.k_config([2]), Shape.k_config([3]), Shape.of([[0], [1], [0, 0], [0, 1]])]


@one_thread()
def assert_lossless(
    rule: type[Rule] | str, children: Kind | Proposer, *, nodes: int = 4, depth: int = 2, vocabulary: int = 3
) -> None:
    """Assert that a step emits tokens of the target's distribution, to 1e-9 in total variation.

    Args:
        rule: a `Rule`, or the name of one.
        children: their kind, for static trees of up to three children; or a `Proposer`, for the trees that it grows.
        nodes: most of a proposer's trees.
        depth: bound of its `max_depth`.
        vocabulary: of the models. Time grows steeply with all three.

    Raises:
        AssertionError: it does not; the message has p, q, the children and what is emitted.
    """
    rule = RULES[rule] if isinstance(rule, str) else rule
    if isinstance(children, Proposer):
        proposer = copy(children)
        proposer.kind = rule.kind_of(proposer.kinds) or proposer.kind
        proposer.max_depth = min(proposer.max_depth, depth)
        _assert_lossless(rule, proposer, f"the first nodes of {type(proposer).__name__}'s trees", nodes, vocabulary)
        return
    if children not in KINDS:
        raise ValueError(f"assert_lossless: children are a proposer or one of {', '.join(KINDS)}, got {children!r}")
    most = min(rule.most or 3, 2 if children == "hub_pair" else 3)
    for shape in SHAPES:
        if shape.max_children <= most:
            name = f"the nodes {[list(path) for path in shape.paths]}"
            _assert_lossless(rule, StaticTree(shape, kind=children), name, len(shape), vocabulary)


def emitted_probs(
    rule: type[Rule],
    proposer: Proposer,
    models: Models,
    *,
    nodes: int,
    temperature: float = TEMPERATURE,
    told: Kind | None = None,
    greedy: bool = False,
    change: Callable[[Drafts], Drafts] = lambda drafts: drafts,
    **options: Any,
) -> Tensor:
    """Distribution of the next max_depth + 1 tokens, [cuts, pairs of models, V ** (max_depth + 1)].

    Args:
        told: kind of children that `traversal` is told; None: the proposer's.
        greedy, options: of `every_draft`.
        change: applied to all trees before they are cut.
    """
    drafts, targets = models
    trees = every_draft(proposer, drafts, nodes=nodes, temperature=temperature, greedy=greedy, **options)
    assert trees.tree.valid.any(), f"{type(proposer).__name__} drafts no node, so nothing is proved"
    trees = every_cut(change(trees), len(drafts))
    probs = emitted(trees, targets, rule, told or proposer.kind, length=proposer.max_depth + 1).probs
    return probs.unflatten(0, (-1, len(targets)))


def _assert_lossless(rule: type[Rule], proposer: Proposer, trees: str, nodes: int, vocabulary: int) -> None:
    drafts, targets = random_pairs(vocabulary, proposer.max_depth, TEMPERATURE)
    drafts, targets = [*drafts, drafts[0]], [*targets, ToyLM(1e6 * targets[0].logits)]  # and a greedy one
    probs = emitted_probs(rule, proposer, (drafts, targets), nodes=nodes)
    length = proposer.max_depth + 1
    expected = torch.stack([target.continuations(length) for target in targets])
    distance = (probs - expected).abs().sum(2) / 2  # [cuts, pairs]
    wrong = (~(distance < EXACT)).nonzero()
    if len(wrong) == 0:
        return
    cut, pair = wrong[0].tolist()  # the smallest tree
    path, token_probs = _worst_node(probs[cut, pair], targets[pair], length)
    history = targets[pair].history(path)
    p = targets[pair].probs[history]
    q = softmax_at(drafts[pair].logits[[history]], torch.tensor([TEMPERATURE]))[0]
    raise AssertionError(
        f"{rule.__name__} is not lossless for {proposer.kind} children: total variation {distance[cut, pair]:.2e}\n"
        f"  children    {trees}, {cut} of them verified\n"
        f"  after       {list(path) if path else 'the root'}\n"
        f"  q           {_text(q)}\n"
        f"  p           {_text(p)}\n"
        f"  emitted     {_text(token_probs)}\n"
        f"  difference  {_text(token_probs - p)}"
    )


def _worst_node(probs: Tensor, target: ToyLM, length: int) -> tuple[Path, Tensor]:
    """Tokens after which the next differs most from the target's, and its distribution [V], of sequences [V ** L]."""
    worst, node, law = -1.0, Path(), probs
    for depth in range(length):
        rows = probs.view(target.vocabulary**depth, target.vocabulary, -1).sum(2)
        for row, path in zip(rows, product(range(target.vocabulary), repeat=depth), strict=True):
            chance = row.sum()
            difference = float((row - chance * target.probs[target.history(path)]).abs().sum().nan_to_num(2.0))
            if difference > worst:
                worst, node, law = difference, path, row / chance
    return node, law


def _text(values: Tensor) -> str:
    return "[" + ", ".join(f"{round(value, 6) + 0.0:.6f}" for value in values.tolist()) + "]"
