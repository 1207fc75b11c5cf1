"""Allocating the verified nodes of a batch to its trees."""

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.budget.curve import Curve

LEAST = 1e-300
"""Smallest value of a node; an empty slot has 0."""


def allocate(
    values: Tensor,
    *,
    verify: Curve,
    spent: float,
    sampled: bool,
    most: int | None = None,
    rows: int = 0,
    rate: float | None = None,
) -> Tensor:
    """How many nodes of each tree to verify, [R]: a prefix of each list.

    The gain of a step is one token per request plus the expected accepted nodes; its cost is the time `spent` on
    drafting plus a verification of all rows. Nodes of all trees are taken by decreasing value:

    - deterministic children (`sampled` false): as many as maximise gain / cost; any choice is lossless (`target_only`).
    - sampled children: up to the first node whose gain over marginal cost, on the convex hull of the cost, is below the
      rate so far. This is a stopping rule that looks at nothing later, so it is lossless. Maximising the rate is not,
      where the cost curve has plateaus.

    With a `rate` (what time is worth elsewhere), gain - rate * cost replaces gain / cost.

    Args:
        values: [R, N] acceptance probability of each node, known before its token is sampled; 0: no node. A node counts
            for at most the value of the one before it in its list.
        verify: seconds by rows, roots included.
        spent: seconds.
        most: upper bound of the nodes of the whole batch.
        rows: rows of the verification other than roots and nodes.
        rate: tokens per second.
    """
    requests = len(values)
    value = np.minimum.accumulate(values.numpy().astype(np.float64), axis=1).T.ravel()
    order = np.argsort(-value, kind="stable")  # by value, ties by position in the list, then by request: never by token
    value = value[order]
    gain = np.full(1 + len(value), float(requests))
    np.cumsum(value, out=gain[1:])
    gain[1:] += requests
    total_rows = np.arange(rows + requests, rows + requests + len(gain))
    seconds = (verify.hull() if sampled else verify).at(total_rows) + spent
    if sampled:
        price = gain[:-1] / seconds[:-1] if rate is None else rate
        unprofitable = value < np.maximum(price * np.diff(seconds), LEAST)
        size = int(unprofitable.argmax()) if unprofitable.any() else len(value)
    else:
        score = gain / seconds if rate is None else gain - rate * seconds
        score[1:][value <= 0] = -np.inf
        size = int(score.argmax())
    if most is not None:
        size = min(size, most)
    return torch.from_numpy(np.bincount(order[:size] % requests, minlength=requests))


def outcome(values: Tensor, *, verify: Curve, spent: float, sampled: bool) -> tuple[float, float]:
    """Expected tokens and seconds of a step that allocates these nodes [R, N], in any order; see `allocate`."""
    falling = values.sort(1, descending=True).values
    kept = allocate(falling, verify=verify, spent=spent, sampled=sampled)
    taken = torch.arange(falling.shape[1]) < kept[:, None]
    requests = len(values)
    return requests + float(falling[taken].sum()), verify.cost(requests + int(kept.sum())) + spent


def best(values: Tensor, room: Tensor, most: int) -> Tensor:
    """The `most` nodes of highest value of all trees: how many of each tree, [R].

    Ties go to the earlier position in the list, then the earlier request. The number is fixed, so pruning depends on no
    token that it removes. No host sync.

    Args:
        values: [R, N] as in `allocate`, or their logarithms.
        room: [R] upper bound of the nodes of each list; their sum is at least `most`. Empty positions within the room
            come after all nodes.
    """
    requests, nodes = values.shape
    beyond = torch.arange(nodes, device=values.device) >= room[:, None]
    value = values.double().clamp(min=-1e300).cummin(1).values.masked_fill(beyond, -torch.inf)
    order = value.t().flatten().sort(descending=True, stable=True).indices
    return (order.argsort() < most).view(nodes, requests).sum(0)
