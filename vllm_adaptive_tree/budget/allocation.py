"""How many nodes of each tree a batch verifies."""

import numpy as np
import torch
from torch import Tensor

from vllm_adaptive_tree.budget.curve import Curve

LEAST = 1e-300
"""The value of a node, at least; a slot without one has 0."""


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
    """The number of nodes to keep of each tree, [R]: of its list, the first ones.

    The gain of a step is one token a request and the expected accepted nodes; its cost is what was `spent` on drafting
    and a verification of all rows. Over the nodes of all trees by decreasing value:

    - chosen children (`sampled` false): as many as make gain / cost largest; any choice is lossless (`target_only`).
    - drawn ones: up to the first node whose own gain over cost is below the rate so far, cost being the convex hull.
      That asks nothing of what comes later, so it is a run that stopped earlier: lossless. The largest rate is not,
      where the cost has plateaus.

    Where a `rate` is given that time is worth elsewhere, gain - rate * cost takes the place of gain / cost.

    Args:
        values: [R, N] the chance that each node is accepted, known before its token is drawn if it is drawn; 0 where
            there is no node. A node counts for no more than the one before it in its list.
        verify: seconds by rows, roots included.
        spent: seconds.
        most: nodes of the whole batch.
        rows: that the verification has besides roots and nodes.
        rate: tokens per second.
    """
    requests = len(values)
    value = np.minimum.accumulate(values.numpy().astype(np.float64), axis=1).T.ravel()
    order = np.argsort(-value, kind="stable")  # by value, ties by place in the list, then by request: never by token
    value = value[order]
    gain = np.full(1 + len(value), float(requests))
    np.cumsum(value, out=gain[1:])
    gain[1:] += requests
    whole = np.arange(rows + requests, rows + requests + len(gain))
    seconds = (verify.hull() if sampled else verify).at(whole) + spent
    if sampled:
        worth = gain[:-1] / seconds[:-1] if rate is None else rate
        short = value < np.maximum(worth * np.diff(seconds), LEAST)
        size = int(short.argmax()) if short.any() else len(value)
    else:
        score = gain / seconds if rate is None else gain - rate * seconds
        score[1:][value <= 0] = -np.inf
        size = int(score.argmax())
    if most is not None:
        size = min(size, most)
    return torch.from_numpy(np.bincount(order[:size] % requests, minlength=requests))


def outcome(values: Tensor, *, verify: Curve, spent: float, sampled: bool) -> tuple[float, float]:
    """Tokens and seconds of a step that allocates these nodes [R, N], in any order; as in `allocate`."""
    falling = values.sort(1, descending=True).values
    kept = allocate(falling, verify=verify, spent=spent, sampled=sampled)
    taken = torch.arange(falling.shape[1]) < kept[:, None]
    requests = len(values)
    return requests + float(falling[taken].sum()), verify.cost(requests + int(kept.sum())) + spent


def best(values: Tensor, room: Tensor, most: int) -> Tensor:
    """`most` nodes of all trees by decreasing value, ties by place in the list, then by request: how many of each, [R].

    The number is given, so nothing is asked of a token that it would cut, and nothing is read on the host.

    Args:
        values: [R, N] as in `allocate`; logarithms serve as well.
        room: [R] nodes of each list, at most; together at least `most`. A place in the room that holds no node comes
            after all nodes.
    """
    requests, nodes = values.shape
    behind = torch.arange(nodes, device=values.device) >= room[:, None]
    value = values.double().clamp(min=-1e300).cummin(1).values.masked_fill(behind, -torch.inf)
    order = value.t().flatten().sort(descending=True, stable=True).indices
    return (order.argsort() < most).view(nodes, requests).sum(0)
