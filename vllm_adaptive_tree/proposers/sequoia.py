"""Sequoia: the best static tree for a positional acceptance vector (Chen et al., arXiv 2402.12374)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch.nn.functional import pad

from vllm_adaptive_tree.options import count, file
from vllm_adaptive_tree.proposers.options import bundled, existing_file
from vllm_adaptive_tree.proposers.static_tree import ShapedOptions, StaticTree
from vllm_adaptive_tree.trees import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class SequoiaOptions(ShapedOptions):
    vector: str | None = file()
    """JSON file {"vector": [P(first child accepted), P(second), ..]}."""
    max_depth: int = count(10)

    def shipped(self) -> Path | None:
        return bundled("sequoia.json") if self.vector is None else None


class Sequoia(StaticTree):
    """A static tree of `sequoia_shape`."""

    fused = "vllm_adaptive_tree.kernels.proposers:FusedSequoia"
    Options = SequoiaOptions

    @classmethod
    def build(cls, options: SequoiaOptions, *, nodes: int) -> Self:
        vector = _vector(options.vector or options.shipped())
        return cls(sequoia_shape(vector, nodes=nodes, max_depth=options.max_depth)).with_children(options)


def sequoia_shape(vector: Sequence[float], *, nodes: int, max_depth: int) -> Shape:
    """The shape with the largest expected number of accepted tokens, by the paper's dynamic program.

    Args:
        vector: P[b], the unconditional probability that the b-th child of a node (drawn without replacement) is the
            accepted one.
        nodes: nodes of the tree, without the root.
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
            part_size = shares[levels - 1][rank][size]
            if part_size:
                paths.append((*path, rank))
                lay_out((*path, rank), part_size - 1, levels - 1)
                size -= part_size

    lay_out((), nodes, len(shares))
    return Shape.of(paths)


def _vector(file: str | Path | None) -> list[float]:
    path = existing_file(file, "vector")
    try:
        vector = json.loads(path.read_text())["vector"]
        if not vector or not all(0 <= chance <= 1 for chance in vector):
            raise ValueError(vector)
        return [float(chance) for chance in vector]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"speculative_config['tree']['vector']: {str(file)!r} must hold {{\"vector\": [numbers between 0 and 1]}}"
        ) from error
