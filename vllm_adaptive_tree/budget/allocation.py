"""Allocation of a batch's verified nodes to its trees."""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vllm_adaptive_tree.budget.cost import Curve

LEAST = 1e-300
"""Smallest value of a node; an empty slot has 0."""


def allocate(
    values: ArrayLike,
    *,
    verify: Curve,
    price: float,
    least: float | None = None,
    row: float = 0.0,
    rows: int = 0,
    most: int | None = None,
) -> NDArray[np.int64]:
    """Number of nodes of each tree to verify, [R]: a prefix of each list.

    The gain of a node is its expected tokens, its cost the share of a verification of all rows, at `price` tokens a
    second. Nodes of all trees are taken by decreasing value:

    - deterministic children: as many as maximise gain - cost; any choice is lossless (`target_only`).
    - sampled children: all that are worth `least`, which past steps say. This is a stopping rule that reads nothing
    later, so it is lossless. Maximising is not, where the cost curve has plateaus.

    Args:
        values: [R, N] acceptance probability of each node, known before its token is sampled; 0: no node. A node counts
            for at most the value of the one before it in its list.
        verify: seconds by rows, roots included.
        price: tokens per second of the whole batch, from past steps.
        least: value that sampled children need; None: children are deterministic.
        row: seconds of each row besides, for its context.
        rows: rows of the verification other than roots and nodes.
        most: upper bound of the nodes of the whole batch.
    """
    falling = np.minimum.accumulate(np.asarray(values, np.float64), axis=1)
    requests, value = len(falling), falling.T.ravel()
    order = np.argsort(-value, kind="stable")  # by value, ties by position in the list, then by request: never by token
    value = value[order]
    if least is not None:
        size = int(np.count_nonzero(value >= max(least, LEAST)))  # the others are last
    else:
        total_rows = np.arange(rows + requests, rows + requests + 1 + len(value))
        cost = price * (verify.at(total_rows) + row * total_rows)
        nodes = int(np.count_nonzero(value > 0))
        score = value[:nodes].cumsum() - cost[1 : 1 + nodes]
        size = 1 + int(score.argmax()) if nodes and score.max() > -cost[0] else 0
    if most is not None:
        size = min(size, most)
    return np.bincount(order[:size] % requests, minlength=requests)


def top_nodes(values: Tensor, capacity: Tensor, count: int) -> Tensor:
    """Number of nodes of each tree, [R], among the `count` nodes of highest value of all trees.

    Ties go to the earlier position in the list, then the earlier request. The number is fixed, so pruning does not
    depend on a token that it removes. No host sync.

    Args:
        values: [R, N] as in `allocate`, or their logarithms.
        capacity: [R] upper bound of the nodes of each list; their sum is at least `count`. Empty positions within it
            come after all nodes.
    """
    requests, nodes = values.shape
    beyond = torch.arange(nodes, device=values.device) >= capacity[:, None]
    value = values.double().clamp(min=-1e300).cummin(1).values.masked_fill(beyond, -torch.inf)
    order = value.t().flatten().sort(descending=True, stable=True).indices
    return (order.argsort() < count).view(nodes, requests).sum(0)
