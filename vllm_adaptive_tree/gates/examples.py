"""Training examples from verified trees: features as computed at inference, and labels from acceptance."""

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
    """A verified tree of N nodes; the draft read I of them, the root first."""

    tokens: Tensor  # [N]
    parent: Tensor  # [N], -1: the root
    depth: Tensor  # [N], 1 for children of the root
    accepted: Tensor  # [N] bool
    row: Tensor  # [1 + N], the root first: each node's row of `draft`, -1 if it was not read
    draft: Tensor  # [I, V] logits
    hidden: Tensor | None  # [I, H] of the draft, if recorded
    draft_temperature: float
    target: Tensor  # [1 + N, V] logits, the root first
    temperature: float  # of the request, 0: greedy


def c2t(tree: Verified, *, entropy_top: int) -> Examples:
    """One example per node: the inputs of C2T's features, and a label, 1 on the accepted path."""
    q = _draft_log_probs(tree, tree.draft)
    parent_row = tree.row[1 + tree.parent]
    path = q.new_zeros(1 + len(tree.tokens))  # log path probability, the root first
    for depth in range(1, int(tree.depth.max()) + 1):
        at = (tree.depth == depth).nonzero()[:, 0]
        path[1 + at] = path[1 + tree.parent[at]] + q[parent_row[at], tree.tokens[at]]
    return {
        "path": path[1:],
        "entropy": entropy(q, entropy_top)[parent_row],
        "depth": tree.depth - 1,
        "label": tree.accepted.float(),
    }


def mcsd_type2(tree: Verified) -> Examples:
    """One example per node with children that the walk reached: its distribution, and a label, 1 if a child was
    accepted.

    The children of other nodes were never tested.
    """
    reached = torch.cat([torch.ones_like(tree.accepted[:1]), tree.accepted])
    inner = torch.zeros_like(reached).index_fill(0, 1 + tree.parent, 1)
    has_accepted = torch.zeros_like(reached).index_fill(0, 1 + tree.parent[tree.accepted], 1)
    at = (reached & inner).nonzero()[:, 0]
    return {
        "features": decision_features(_draft_log_probs(tree, tree.draft[tree.row[at]])),
        "label": has_accepted[at].float(),
    }


def mcsd_type1(tree: Verified) -> Examples:
    """One example per node with children: its hidden state, and min(1, p(x) / q(x)) of its first child x.

    Only the first child is drawn from q itself; later siblings come from q without the earlier ones.
    """
    assert tree.hidden is not None
    parent, x = tree.parent, tree.tokens[:, None]
    first = ((parent[:, None] == parent).int().argmax(1) == torch.arange(len(parent))).nonzero()[:, 0]
    row, parent, x = tree.row[1 + parent[first]], 1 + parent[first], x[first]
    q = _draft_log_probs(tree, tree.draft[row]).exp().gather(1, x)[:, 0]
    p = _target_probs(tree.target[parent], tree.temperature).gather(1, x)[:, 0]
    return {"features": tree.hidden[row].float(), "label": (p / q).clamp(max=1.0)}


def sequoia(tree: Verified) -> Examples:
    """One example per tree: rank of the accepted child of the root, from 0; -1: none."""
    children = (tree.parent < 0).nonzero()[:, 0]
    hit = tree.accepted[children]
    return {"rank": torch.where(hit.any(), hit.int().argmax(), -1)[None]}


EXAMPLE_BUILDERS: dict[str, Callable[..., Examples]] = {
    "c2t": c2t,
    "mcsd-type1": mcsd_type1,
    "mcsd-type2": mcsd_type2,
    "sequoia": sequoia,
}


def _draft_log_probs(tree: Verified, logits: Tensor) -> Tensor:
    return log_softmax_at(logits, torch.full_like(logits[:, 0], tree.draft_temperature, dtype=torch.float32))


def _target_probs(logits: Tensor, temperature: float) -> Tensor:
    """Distributions [M, V] of a request with no sampling parameter but the temperature."""
    if temperature == 0:
        return torch.zeros_like(logits).scatter(1, logits.argmax(1, keepdim=True), 1.0)
    return softmax_at(logits, torch.full_like(logits[:, 0], temperature, dtype=torch.float32))
