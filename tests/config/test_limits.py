"""Limits of a verification cut known paths as they end a walk."""

import torch

from vllm_adaptive_tree.acceptance import Accepted, walk
from vllm_adaptive_tree.engine.v1.limits import Limits
from vllm_adaptive_tree.trees import TreeBatch


def test_a_path_is_cut_as_a_walk_ends() -> None:
    chain = torch.arange(3)
    tree = TreeBatch(*(column.expand(5, -1) for column in (chain + 10, chain - 1, chain + 1, torch.zeros(3))))
    tokens = torch.tensor([[10, 11, 12, 5], [10, 11, 12, 5], [10, 11, 12, 5], [10, 7, -1, -1], [9, -1, -1, -1]])
    nodes = torch.tensor([[0, 1, 2, -1], [0, 1, 2, -1], [0, 1, 2, -1], [0, -1, -1, -1], [-1, -1, -1, -1]])
    limits = Limits(torch.tensor([4, 2, 1, 3, 1]), {})
    level = 0

    def draw(node: torch.Tensor, active: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal level
        level += 1
        token = tokens[:, level - 1]
        return token, limits.go_on(level, token)

    found, wanted = limits.cut(Accepted(tokens, nodes)), walk(tree, draw, levels=3)
    assert found.tokens.equal(wanted.tokens)
    assert found.nodes.equal(wanted.nodes)
    assert found.tokens[1].tolist() == [10, 11, -1, -1]
    assert found.nodes[1].tolist() == [0, -1, -1, -1]
