"""The walk from the root: at every node a token drawn from the target's law; a child that carries it is accepted."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_adaptive_tree.trees import TreeBatch


class Accepted(NamedTuple):
    """The emitted tokens of R requests: the accepted path and the one extra token behind it; -1 pads."""

    tokens: Tensor  # [R, D + 1]
    nodes: Tensor  # [R, D + 1]: the node that carried each token, -1 for the extra token


def walk(
    tree: TreeBatch,
    draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    *,
    levels: int,
    proceed: Callable[[Tensor], bool] = lambda active: True,
) -> Accepted:
    """Draw a token at the root; while a child carries it, go there and draw again.

    Lossless whenever each draw follows the target's law at its node, given everything that led there. A rule (see
    `rules.py`) is a draw that makes a child likely; going into a child that only the residual hit is legal too, since
    what lies below was drawn independently of the coins used here.

    Args:
        draw: (node [R], active [R] bool) -> (token [R] at that node (-1: the root), may_go_on [R] bool: false ends the
            walk behind that token). Rows that are not active are ignored.
        levels: the largest depth of a tree.
        proceed: may read `active` to end the loop early.
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
