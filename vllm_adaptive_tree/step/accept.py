"""Acceptance of a batch: with the target's own draws, or by the rule of the pair."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted, Children, Draw, longest_continuation, traversal, walk
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.step.ports import Requests, Target, Verification

V = TypeVar("V", bound=Verification)
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Draw at a node of each request, as `walk` asks."""


def accept(pair: Pair, target: Target[V], verification: V, requests: Requests) -> Accepted:
    """Walk R trees. Greedy requests, and others `from_target`, take the target's own draws; the rest the rule's."""
    if requests.all_from_target and pair.init_width == 1:
        return target.walk_at_once(verification) or walked(target.draw, target, verification)
    rng, from_target = requests.rng(purpose=1), requests.from_target
    by_rule = _draw_by_rule(pair, target, verification, rng, from_target)
    paths = _whole_paths(pair, target, verification, rng, from_target, by_rule)
    if paths is None:
        return walked(by_rule, target, verification)
    return target.emit(verification, paths, from_target if pair.init_width == 1 else None)


def _whole_paths(
    pair: Pair, target: Target[V], verification: V, rng: RandomSource, from_target: Tensor | None, by_rule: Step
) -> Accepted | None:
    """Paths that are known before anything is emitted; None: the rule walks node by node."""
    if pair.init_width > 1:
        return _longest(pair, target, verification, by_rule)
    active = None if from_target is None else ~from_target
    paths = target.rule_at_once(pair, verification, rng, active)
    if paths is not None or pair.rule.draw is not None:
        return paths
    return traversal(
        verification.tree,
        pair.proposer.kind,
        target.probs,
        verification.draft_probs,
        rng,
        levels=verification.levels,
        most=pair.most,
        chosen=verification.chosen,
        active=active,
        proceed=target.proceed,
    )


def _draw_by_rule(
    pair: Pair, target: Target[V], verification: V, rng: RandomSource, from_target: Tensor | None
) -> Step:
    own: Draw | None = pair.rule.draw
    rule = None if own is None else target.rules.get(own, own)
    width = min(pair.most, verification.max_children)

    def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        def choose(p: Tensor, sample: Callable[[], Tensor]) -> Tensor:
            assert rule is not None
            q, planned = verification.draft_probs(node)
            children = Children(verification.tree.children(node, width), planned, pair.most)
            token = rule(p, q, children, rng.fold_in(node + 1)).clamp(min=0)
            return token if from_target is None else torch.where(from_target, sample(), token)

        return target.draw_by(choose, node, active)

    return draw


def _longest(pair: Pair, target: Target[V], verification: V, by_rule: Step) -> Accepted:
    """Longest of the walks below each token that the target has sampled itself; lossy."""

    def draw(node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        return by_rule(node, active)[0], torch.ones_like(active)

    tree, initial, levels = verification.tree, verification.initial, verification.levels
    return longest_continuation(tree, initial, draw, levels=levels, most=pair.init_width, proceed=target.proceed)


def walked(draw: Step, target: Target[V], verification: V) -> Accepted:
    return walk(verification.tree, draw, levels=verification.levels, proceed=target.proceed)
