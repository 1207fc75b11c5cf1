"""What the small models learn from: one verified tree -> features as inference computes them, and what came of them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.proposers.base import log_softmax_at, softmax_at
from vllm_adaptive_tree.proposers.gate import entropy
from vllm_adaptive_tree.proposers.mcsd import decision_features

Examples = dict[str, Tensor]
"""Columns of M rows each."""


class Verified(NamedTuple):
    """A tree of N nodes after its verification; I of its nodes were read by the draft, the root first."""

    tokens: Tensor  # [N]
    parent: Tensor  # [N], -1: the root
    depth: Tensor  # [N], the first layer 1
    accepted: Tensor  # [N] bool
    row: Tensor  # [1 + N], the root first: which row below is a node's, -1 where it was not read
    draft: Tensor  # [I, V] logits
    hidden: Tensor | None  # [I, H] of the draft, where asked for
    draft_temperature: float
    target: Tensor  # [1 + N, V] logits, the root first
    temperature: float  # of the request, 0: greedy


def c2t(tree: Verified, *, entropy_top: int) -> Examples:
    """Every node: what C2T's features are made of, and whether it is on the accepted path."""
    q = _log_law(tree, tree.draft)
    above = tree.row[1 + tree.parent]
    path = q.new_zeros(1 + len(tree.tokens))  # log path probability, the root first
    for depth in range(1, int(tree.depth.max()) + 1):
        at = (tree.depth == depth).nonzero()[:, 0]
        path[1 + at] = path[1 + tree.parent[at]] + q[above[at], tree.tokens[at]]
    return {
        "path": path[1:],
        "entropy": entropy(q, entropy_top)[above],
        "depth": tree.depth - 1,
        "label": tree.accepted.float(),
    }


def mcsd_type2(tree: Verified) -> Examples:
    """Every node that has children and that the walk reached: its law, and whether a child was accepted.

    The children of other nodes were not tested.
    """
    reached = torch.cat([torch.ones_like(tree.accepted[:1]), tree.accepted])
    inner = torch.zeros_like(reached).index_fill(0, 1 + tree.parent, 1)
    went_on = torch.zeros_like(reached).index_fill(0, 1 + tree.parent[tree.accepted], 1)
    at = (reached & inner).nonzero()[:, 0]
    return {
        "features": decision_features(_log_law(tree, tree.draft[tree.row[at]])),
        "label": went_on[at].float(),
    }


def mcsd_type1(tree: Verified) -> Examples:
    """Every node that has children: its hidden state, and min(1, p(x) / q(x)) of its first child x.

    The first child is drawn from q itself; a later sibling from what is left of q, whose chances are others.
    """
    assert tree.hidden is not None
    above, x = tree.parent, tree.tokens[:, None]
    first = ((above[:, None] == above).int().argmax(1) == torch.arange(len(above))).nonzero()[:, 0]
    row, above, x = tree.row[1 + above[first]], 1 + above[first], x[first]
    q = _log_law(tree, tree.draft[row]).exp().gather(1, x)[:, 0]
    p = _target_law(tree.target[above], tree.temperature).gather(1, x)[:, 0]
    return {"features": tree.hidden[row].float(), "label": (p / q).clamp(max=1.0)}


def sequoia(tree: Verified) -> Examples:
    """The root: which of its children was accepted, counted from 0; -1: none."""
    children = (tree.parent < 0).nonzero()[:, 0]
    hit = tree.accepted[children]
    return {"rank": torch.where(hit.any(), hit.int().argmax(), -1)[None]}


KINDS: dict[str, Callable[..., Examples]] = {
    "c2t": c2t,
    "mcsd-type1": mcsd_type1,
    "mcsd-type2": mcsd_type2,
    "sequoia": sequoia,
}


def _log_law(tree: Verified, logits: Tensor) -> Tensor:
    return log_softmax_at(logits, torch.full_like(logits[:, 0], tree.draft_temperature, dtype=torch.float32))


def _target_law(logits: Tensor, temperature: float) -> Tensor:
    """[M, V]: what a request without other sampling parameters is drawn from."""
    if temperature == 0:
        return torch.zeros_like(logits).scatter(1, logits.argmax(1, keepdim=True), 1.0)
    return softmax_at(logits, torch.full_like(logits[:, 0], temperature, dtype=torch.float32))
