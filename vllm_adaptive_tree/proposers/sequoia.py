"""Sequoia: the best static tree for a positional acceptance vector (Chen et al., arXiv 2402.12374)."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from vllm_adaptive_tree.trees import Shape


def sequoia_shape(vector: Sequence[float], *, nodes: int, max_depth: int) -> Shape:
    """The shape with the largest expected number of accepted tokens, by the paper's dynamic programme.

    Args:
        vector: P[b], the unconditional probability that the b-th child of a node (drawn without replacement) is the
            accepted one.
        nodes: nodes of the tree, the root not counted.
        max_depth: levels of nodes below the root.
    """
    below = torch.zeros(nodes + 1, dtype=torch.float64)  # best value of `size` nodes in the levels below a child
    shares: list[list[list[int]]] = []  # [levels][rank][size] -> nodes of the child's subtree, itself included
    for _ in range(min(max_depth, nodes)):
        later, share = torch.zeros_like(below), []  # later: best value of `size` nodes among the siblings that follow
        for chance in reversed(vector):
            rest = pad(later.flip(0), (0, nodes), value=-torch.inf).unfold(0, nodes, 1)[1:-1]  # [nodes - size, own - 1]
            best = (chance * (1 + below[:-1]) + rest).max(1)
            later, own = (pad(column.flip(0), (1, 0)) for column in (best.values, best.indices + 1))
            share.append(own.tolist())
        below = later
        shares.append(share[::-1])

    paths: list[tuple[int, ...]] = []

    def lay_out(path: tuple[int, ...], size: int, levels: int) -> None:
        for rank in range(len(vector) if levels else 0):
            own = shares[levels - 1][rank][size]
            if own:
                paths.append((*path, rank))
                lay_out((*path, rank), own - 1, levels - 1)
                size -= own

    lay_out((), nodes, len(shares))
    return Shape.of(paths)
