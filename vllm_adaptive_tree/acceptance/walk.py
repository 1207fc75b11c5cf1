"""The walk from the root: sample a token from the target at each node; a child with that token is accepted."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.trees import TreeBatch


class Accepted(NamedTuple):
    """The emitted tokens of R requests: the accepted path and one bonus token; -1 pads."""

    tokens: Tensor  # [R, D + 1]
    nodes: Tensor  # [R, D + 1]: the node of each token, -1 for the bonus token


def walk(
    tree: TreeBatch,
    draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    *,
    levels: int,
    proceed: Callable[[Tensor], bool] = lambda active: True,
) -> Accepted:
    """Sample a token at the root; while a child has that token, move to the child and sample again.

    Lossless if each sample follows the target's distribution at its node given the path so far. An acceptance rule (see
    `legality.py`) is a way of sampling that makes the children likely. A child hit only by the residual may be
    entered too: its subtree was drawn independently of the random numbers used here.

    Args:
        draw: (node [R], active [R] bool) -> (token [R] sampled at that node (-1: the root), may_go_on [R] bool: false
            ends the walk after that token). Rows that are not active are ignored.
        levels: the largest depth of any tree.
        proceed: called with `active`; returning false ends the loop early.
    """
    node = torch.full_like(tree.tokens[:, 0], -1)
    active = torch.ones_like(node, dtype=torch.bool)
    tokens, nodes = [], []
    for _ in range(levels + 1):
        token, may_go_on = draw(node, active)
        child = torch.where(active & may_go_on, tree.child(node, token), -1)
        tokens.append(token.masked_fill(~active, -1))
        nodes.append(child)
        active = child >= 0
        node = torch.where(active, child, node)
        if not proceed(active):
            break
    return Accepted(torch.stack(tokens, 1), torch.stack(nodes, 1))
