"""How many nodes of each tree a batch verifies."""

import torch
from torch import Tensor

from vllm_adaptive_tree.budget.curve import Curve


def allocate(values: Tensor, *, verify: Curve, spent: float, sampled: bool, most: int | None = None) -> Tensor:
    """The number of nodes to keep of each tree, [R]: of its list, the first ones.

    The gain of a step is one token a request and the expected accepted nodes; its cost is what was `spent` on drafting
    and a verification of all rows. Over the nodes of all trees by decreasing value:

    - chosen children (`sampled` false): as many as make gain / cost largest; any choice is lossless (`target_only`).
    - drawn ones: up to the first node whose own gain over cost is below the rate so far, cost being the convex hull.
      That asks nothing of what comes later, so it is a run that stopped earlier: lossless. The largest rate is not,
      where the cost has plateaus.

    Args:
        values: [R, N] the chance that each node is accepted, known before its token is drawn if it is drawn; 0 where
            there is no node. A node counts for no more than the one before it in its list.
        verify: seconds by rows, roots included.
        spent: seconds.
        most: nodes of the whole batch.
    """
    requests, nodes = values.shape
    values = values.double().cummin(1).values
    # by value, ties by place in the list, then by request: never by token
    order = values.t().flatten().argsort(descending=True, stable=True)
    value = values.t().flatten()[order]
    gain = requests + torch.nn.functional.pad(value.cumsum(0), (1, 0))  # [R * N + 1]
    count = torch.arange(len(gain), device=values.device)
    seconds = spent + (verify.hull() if sampled else verify).at(requests + count)
    rate = gain / seconds
    if sampled:
        pays = (value >= rate[:-1] * seconds.diff()) & (value > 0)
        size = pays.long().cumprod(0).sum()
    else:
        size = torch.where(torch.nn.functional.pad(value > 0, (1, 0), value=True), rate, -1.0).argmax()
    if most is not None:
        size = size.clamp(max=most)
    kept = torch.zeros_like(value, dtype=torch.int64).scatter(0, order, (count[:-1] < size).long())
    return kept.view(nodes, requests).sum(0)
